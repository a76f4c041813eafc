"""Turns a GGUF file into a folder that transformers loads in seconds: half-precision safetensors and a tokenizer."""

from contextlib import redirect_stderr
from copy import deepcopy
from io import StringIO
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from saguaro_core.models.native.blocks import BLOCKS_FILE
from saguaro_core.models.native.gguf_blocks import write_blocks
from saguaro_core.models.quiet import quiet_transformers

_SINGLE_DIGITS = "smollm"


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Write config, float16 weights, generation config and tokenizer of `gguf_path` into the existing `folder`.

    The quantised matrices are kept as they are too, in a file of their own.
    """
    # The reader draws a progress bar of its own on stderr, which no setting of transformers switches off.
    with quiet_transformers(), redirect_stderr(StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
        _restore_pre_tokenizer(tokenizer, gguf_path)
        dense = _read_dense(gguf_path)
        dense.save_pretrained(folder)
        weights = {name: tensor.numpy() for name, tensor in dense.state_dict().items()}
        write_blocks(gguf_path, weights, folder / BLOCKS_FILE)
        tokenizer.save_pretrained(folder)


def _read_dense(gguf_path: Path) -> PreTrainedModel:
    """The model with plain float16 weights; every trace of the quantised file is gone from its config."""
    loaded = AutoModelForCausalLM.from_pretrained(
        str(gguf_path.parent),
        gguf_file=gguf_path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float16,
    )
    config = deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float16
    with torch.device("meta"):
        dense: PreTrainedModel = type(loaded)(config)
    dense.load_state_dict(loaded.state_dict(), assign=True)
    dense.tie_weights()
    dense.generation_config = loaded.generation_config
    return dense


def _restore_pre_tokenizer(tokenizer: PreTrainedTokenizerBase, gguf_path: Path) -> None:
    """Split digits one by one, as the original tokenizer does.

    transformers drops this step when it reads a GGUF file, which changes the ids of indented numbers.
    """
    kind = GGUFReader(str(gguf_path)).get_field("tokenizer.ggml.pre")
    if kind is None or kind.contents() != _SINGLE_DIGITS:
        return
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
