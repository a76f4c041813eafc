"""Loads the target and the draft: the one place where weights enter the engine.

On the CPU weights are kept as float16, whatever the checkpoint says; on an accelerator they keep their own
half-precision type. Nothing here runs code that comes with a model.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from saguaro_core.errors import ModelError
from saguaro_core.models.catalogue import find_entry
from saguaro_core.models.native.blocks import (
    BLOCKS_FILE,
    BlocksFile,
    NoQuantisedWeights,
    QuantisedWeights,
    RowScaledFile,
)
from saguaro_core.models.pairing import check_pairing
from saguaro_core.models.progress import Progress, ignore_progress
from saguaro_core.models.source import ModelSource, find_source, reading
from saguaro_core.models.support import check_supported
from saguaro_core.models.tokens import eos_token_ids, vocabulary_size
from saguaro_core.models.trimmed import HEAD_NAMES, check_complete, is_trimmed_draft, load_trimmed_draft
from saguaro_core.models.wheel import sha256_of

DeviceMap = str | dict[str, Any]

_SPREAD = "cuda"


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """The model whose output is wanted, in eval mode.

    `eos_token_ids` end an answer; the set can be empty. `vocabulary_size` counts real tokens: logits from there on are
    padding and are to be masked. `quantised` finds the matrices that the checkpoint stores in blocks.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str
    dtype: str
    eos_token_ids: frozenset[int]
    context_length: int
    vocabulary_size: int
    quantised: QuantisedWeights = field(default_factory=NoQuantisedWeights)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """The model that guesses, in eval mode; its logits go over its own head.

    `token_ids` maps head rows to the target's token ids; None is the identity. `vocabulary_size` counts the real rows
    of the head.
    """

    model: PreTrainedModel
    token_ids: torch.Tensor | None  # [head rows] int64
    name: str
    revision: str
    dtype: str
    context_length: int
    vocabulary_size: int
    quantised: QuantisedWeights = field(default_factory=NoQuantisedWeights)


def load_target(
    name: str,
    *,
    device: str = "cpu",
    device_map: DeviceMap | None = None,
    dtype: torch.dtype | None = None,
    on_progress: Progress = ignore_progress,
    cache_dir: Path | None = None,
) -> LoadedTarget:
    """Load by catalogue name, hub id or folder, onto `device` or spread by `device_map`. Raises ModelError.

    A catalogue model whose cached files turn out to be damaged is fetched again once.
    """
    source = find_source(name, cache_dir=cache_dir, on_progress=on_progress)
    try:
        return _load_target(source, device, device_map, dtype, on_progress)
    except ModelError:
        if not _is_fetched(name):
            raise
        repaired = find_source(name, cache_dir=cache_dir, on_progress=on_progress, deep=True)
        return _load_target(repaired, device, device_map, dtype, on_progress)


def load_draft(
    name: str,
    *,
    target_name: str,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    on_progress: Progress = ignore_progress,
    cache_dir: Path | None = None,
) -> LoadedDraft:
    """Load a draft for `target_name`, whose tokens it must share; a trimmed draft reads the target's embedding too.

    Raises ModelError, also when the two do not pair.
    """
    target = find_source(target_name, cache_dir=cache_dir, on_progress=on_progress)
    source = find_source(name, cache_dir=cache_dir, on_progress=on_progress)
    on_progress(f"Loading the draft {name}", None)
    if is_trimmed_draft(source):
        return _load_trimmed(source, target, device, dtype)
    return _load_plain_draft(source, target, device, dtype)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer of `source`. Raises ModelError."""
    with reading(source):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(source.location))


def _load_target(
    source: ModelSource,
    device: str,
    device_map: DeviceMap | None,
    dtype: torch.dtype | None,
    on_progress: Progress,
) -> LoadedTarget:
    on_progress(f"Loading the target {source.name}", None)
    tokenizer = load_tokenizer(source)
    model = _load_model(source, device, device_map, dtype)
    return LoadedTarget(
        model=model,
        tokenizer=tokenizer,
        name=source.name,
        revision=_revision(source, model.config),
        dtype=_dtype_name(model),
        eos_token_ids=eos_token_ids(tokenizer, model.generation_config),
        context_length=_context_length(model.config),
        vocabulary_size=_real_tokens(tokenizer, model, source),
        quantised=_quantised(source),
    )


def _load_plain_draft(source: ModelSource, target: ModelSource, device: str, dtype: torch.dtype | None) -> LoadedDraft:
    tokenizer = load_tokenizer(source)
    check_pairing(load_tokenizer(target), tokenizer, target_name=target.name, draft_name=source.name)
    model = _load_model(source, device, None, dtype)
    return LoadedDraft(
        model=model,
        token_ids=None,
        name=source.name,
        revision=_revision(source, model.config),
        dtype=_dtype_name(model),
        context_length=_context_length(model.config),
        vocabulary_size=_real_tokens(tokenizer, model, source),
        quantised=_quantised(source),
    )


def _load_trimmed(source: ModelSource, target: ModelSource, device: str, dtype: torch.dtype | None) -> LoadedDraft:
    with reading(source):
        draft = load_trimmed_draft(source, target, dtype or _preferred_dtype(device, None))
        model = draft.model.to(device)  # type: ignore[arg-type]
        assert source.folder is not None
        revision = sha256_of(source.folder / "model.safetensors")[:12]
    return LoadedDraft(
        model=model,
        token_ids=draft.token_ids,
        name=source.name,
        revision=revision,
        dtype=_dtype_name(model),
        context_length=_context_length(model.config),
        vocabulary_size=draft.token_ids.numel(),
        quantised=RowScaledFile(source.folder / "model.safetensors", HEAD_NAMES, _quantised(target)),
    )


def _load_model(
    source: ModelSource, device: str, device_map: DeviceMap | None, dtype: torch.dtype | None
) -> PreTrainedModel:
    """The supported, complete model on its device, in eval mode."""
    with reading(source):
        config = AutoConfig.from_pretrained(source.location)
        check_supported(config, source.name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=config,
            dtype=dtype
            or _preferred_dtype(device if device_map is None else _SPREAD, config.get_text_config(decoder=True).dtype),
            device_map=device_map,
            output_loading_info=True,
        )
        model, report = loaded
        check_complete(report, source)
        placed = model if device_map is not None else model.to(device)
        return cast(PreTrainedModel, placed.eval())


def _quantised(source: ModelSource) -> QuantisedWeights:
    """The blocks that a converted model keeps beside its half-precision weights."""
    path = None if source.folder is None else source.folder / BLOCKS_FILE
    return BlocksFile(path) if path is not None and path.is_file() else NoQuantisedWeights()


def _preferred_dtype(device: str, stored: torch.dtype | str | None) -> torch.dtype:
    """float16 on the CPU, where prepacked float16 layers take over; the checkpoint's half type elsewhere."""
    if torch.device(device).type == "cpu":
        return torch.float16
    return torch.float16 if stored in (torch.float16, "float16", None) else torch.bfloat16


def _is_fetched(name: str) -> bool:
    entry = find_entry(name)
    return entry is not None and entry.wheel is not None


def _revision(source: ModelSource, config: PretrainedConfig) -> str:
    return source.revision or getattr(config, "_commit_hash", None) or "unknown"


def _dtype_name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _context_length(config: PretrainedConfig) -> int:
    length: int = config.get_text_config(decoder=True).max_position_embeddings
    return length


def _real_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, source: ModelSource) -> int:
    real, rows = vocabulary_size(tokenizer), model.get_output_embeddings().weight.shape[0]
    if real > rows:
        raise ModelError(
            f"The model {source.name!r} has {rows} output rows but its tokenizer knows {real} tokens. "
            "The folder mixes two models; fetch it again."
        )
    return real
