"""What every peer is given: the prompts as the engine reads them, and the tokens that end an answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import GenerationConfig

from saguaro_core.config import Message
from saguaro_core.errors import ModelError
from saguaro_core.models.chat import render_prompt
from saguaro_core.models.load import load_tokenizer
from saguaro_core.models.source import find_source, reading
from saguaro_core.models.tokens import eos_token_ids
from saguaro_core.prompts import WARM_UP, BenchPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Token ids of the prompts and of the warm-up, and the ids that end an answer."""

    prompts: tuple[tuple[int, ...], ...]
    warm_up: tuple[int, ...]
    eos_token_ids: tuple[int, ...]


def prepare(target: str, prompts: Sequence[BenchPrompt]) -> Prepared:
    """Render with the target's own template and tokenizer, as the engine does. Raises ModelError."""
    source = find_source(target)
    tokenizer = load_tokenizer(source)
    try:
        with reading(source):
            generation = GenerationConfig.from_pretrained(source.location)
    except ModelError:  # A model without one: the tokenizer and the template say how an answer ends.
        generation = None

    def ids(prompt: BenchPrompt) -> tuple[int, ...]:
        return tuple(render_prompt(tokenizer, [Message(role="user", content=prompt.text)])[1])

    return Prepared(
        prompts=tuple(ids(prompt) for prompt in prompts),
        warm_up=ids(WARM_UP),
        eos_token_ids=tuple(sorted(eos_token_ids(tokenizer, generation))),
    )
