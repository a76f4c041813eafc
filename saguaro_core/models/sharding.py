"""Spreads a target over several devices, layer by layer, with accelerate."""

from collections.abc import Sequence

import torch
from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.utils import compute_module_sizes
from transformers import AutoConfig, AutoModelForCausalLM

from saguaro_core.models.source import find_source, reading

# Room for one more decoder layer than an even share, since layers are not split.
_SHARE_MARGIN = 1.15


def even_device_map(name: str, devices: Sequence[str]) -> dict[str, int | str]:
    """Which device each module of the target `name` goes to: even shares, decoder layers whole. Raises ModelError."""
    source = find_source(name)
    with reading(source):
        config = AutoConfig.from_pretrained(source.location)
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    total = compute_module_sizes(model)[""]
    indices = [torch.device(device).index or 0 for device in devices]
    share = int(total / len(devices) * _SHARE_MARGIN)
    largest = dict.fromkeys(indices[:-1], share) | {indices[-1]: total}
    placed: dict[str, int | str] = infer_auto_device_map(
        model, max_memory=largest, no_split_module_classes=list(model._no_split_modules or ())
    )
    return placed
