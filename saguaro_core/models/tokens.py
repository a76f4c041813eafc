"""Facts about a tokenizer that a decoder needs: how many tokens are real, and which of them end an answer."""

from collections.abc import Iterable

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

_PROBE = "saguaro end of turn probe"


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest real token id; logits from there on are padding."""
    return max(tokenizer.get_vocab().values()) + 1


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Text -> id of every control token; ordinary added words are not among them."""
    return {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}


def eos_token_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> frozenset[int]:
    """Every id that ends an answer: generation config, tokenizer, and what the chat template puts after a turn.

    An empty set is possible and means: run to the cap.
    """
    configured = None if generation is None else generation.eos_token_id
    found = [*_as_ids(configured), *_as_ids(tokenizer.eos_token_id), *_as_ids(_end_of_turn(tokenizer))]
    return frozenset(found)


def _as_ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else [int(v) for v in value]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The control token that the chat template writes right after an assistant's text."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except (TemplateError, ValueError):
        return None
    tail = text.rpartition(_PROBE)[2].lstrip()
    matches = [(token, token_id) for token, token_id in special_tokens(tokenizer).items() if tail.startswith(token)]
    return max(matches, key=lambda match: len(match[0]))[1] if matches else None
