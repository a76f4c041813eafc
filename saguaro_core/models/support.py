"""Which models the engine can run: decoder-only, full attention in every layer, attention that can be replaced.

Everything else is refused at load, because its cache could not be rolled back or branched without a wrong answer.
"""

from typing import Any

from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from saguaro_core.errors import ModelError

_FULL = "full_attention"
_RECURRENT_MODEL_TYPES = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma"})
_FEATURES = {
    "sliding_attention": "sliding-window attention",
    "chunked_attention": "chunked attention",
    "linear_attention": "linear attention (recurrent state)",
    "hybrid": "hybrid layers (attention and recurrent state)",
    "conv": "convolution layers (recurrent state)",
    "indexed_attention": "sparse indexed attention",
}


def check_supported(config: PretrainedConfig, name: str) -> None:
    """Raise ModelError that names the feature which the engine cannot run."""
    feature = unsupported_feature(config)
    if feature is not None:
        raise ModelError(
            f"The model {name!r} ({config.model_type}) uses {feature}, which is not supported: its cache "
            "cannot be rolled back exactly. Choose a decoder-only model with full attention in every layer "
            "(Llama, Qwen2, Qwen3, SmolLM2 and many more)."
        )


def unsupported_feature(config: PretrainedConfig) -> str | None:
    """What keeps the model from running here, in words; None when nothing does."""
    text_config = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder and a decoder"
    if getattr(text_config, "is_decoder", True) is False:
        return "attention in both directions"
    if text_config.model_type in _RECURRENT_MODEL_TYPES:
        return "a recurrent state"
    return _layer_feature(text_config) or _class_feature(config)


def _layer_feature(config: PretrainedConfig) -> str | None:
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        odd = sorted({str(kind) for kind in layer_types} - {_FULL})
        return ", ".join(_FEATURES.get(kind, kind) for kind in odd) or None
    window: Any = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < config.max_position_embeddings:
        return f"sliding-window attention ({window} tokens)"
    return None


def _class_feature(config: PretrainedConfig) -> str | None:
    """What the model's class says: whether it exists, keeps a state, and lets its attention be replaced."""
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        return "an architecture without a causal language model"
    model_class: type[PreTrainedModel] = mapping[type(config)]
    if getattr(model_class, "_is_stateful", False):
        return "a recurrent state"
    if not getattr(model_class, "_supports_attention_backend", False):
        return "an attention of its own that cannot be replaced"
    return None
