"""A chat as the model reads it: the target's own template, rendered and encoded.

Control tokens come from the template only. What a user types is encoded as plain text, even where it spells a
control token, so that nobody closes a turn from inside a message.
"""

import re
from collections.abc import Iterator, Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from saguaro_core.config import Message
from saguaro_core.errors import InvalidRequest
from saguaro_core.models.tokens import special_tokens

# Private-use characters: they stand for typed control tokens while the template is rendered.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
    """The prompt's text and its token ids, ending where the assistant's answer starts.

    Without a chat template the prompt is `System:`, `User:` and `Assistant:` paragraphs. Raises InvalidRequest when the
    template refuses the messages or a text is no valid Unicode.
    """
    for message in messages:
        _check_unicode(message)
    specials = special_tokens(tokenizer)
    typed = [token for token in specials if any(token in message.content for message in messages)]
    if not typed:
        text = _render(tokenizer, messages)
        return text, (*_start(tokenizer), *_encode(tokenizer, text))
    stand_ins = _stand_ins(typed, messages)
    text = _render(tokenizer, [_replace(message, stand_ins) for message in messages])
    ids = (*_start(tokenizer), *_encode_guarded(tokenizer, text, specials, stand_ins))
    for token, stand_in in stand_ins.items():
        text = text.replace(stand_in, token)
    return text, ids


def _check_unicode(message: Message) -> None:
    """Half of a surrogate pair can arrive in JSON, but no tokenizer can read it."""
    try:
        message.content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The {message.role} message has {error.object[error.start]!r} at position {error.start}, which is half a "
            "character. Remove it."
        ) from error


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    if not tokenizer.chat_template:
        turns = [f"{message.role.capitalize()}: {message.content}" for message in messages]
        return "\n\n".join([*turns, "Assistant:"])
    turns_data = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(turns_data, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        roles = ", ".join(message.role for message in messages)
        raise InvalidRequest(
            f"The target's chat template refuses these messages ({roles}): {error}. Change their roles or order."
        ) from error


def _start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The start token that a prompt without a template needs; a template writes its own."""
    if tokenizer.chat_template or tokenizer.bos_token_id is None:
        return []
    return [tokenizer.bos_token_id] if tokenizer("").input_ids[:1] == [tokenizer.bos_token_id] else []


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, as_plain_text: bool = False) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=as_plain_text).input_ids
    return ids


def _stand_ins(typed: Sequence[str], messages: Sequence[Message]) -> dict[str, str]:
    """Typed control token -> a text that occurs in no message; longer tokens first, as the tokenizer matches them."""
    mark = _OPEN
    while any(mark in message.content for message in messages):
        mark += _OPEN
    ordered = sorted(typed, key=len, reverse=True)
    return {token: f"{mark}{index}{_CLOSE}" for index, token in enumerate(ordered)}


def _replace(message: Message, stand_ins: dict[str, str]) -> Message:
    content = message.content
    for token, stand_in in stand_ins.items():
        content = content.replace(token, stand_in)
    return Message(role=message.role, content=content)


def _encode_guarded(
    tokenizer: PreTrainedTokenizerBase, text: str, specials: dict[str, int], stand_ins: dict[str, str]
) -> Iterator[int]:
    """Ids of a rendered text: control tokens of the template by id, everything between them as plain text.

    The tokenizer cuts at control tokens too, so the plain parts get the ids that they have in the whole text.
    """
    typed = {stand_in: token for token, stand_in in stand_ins.items()}
    pattern = "|".join(re.escape(token) for token in sorted([*specials, *typed], key=len, reverse=True))
    plain = ""
    for part in re.split(f"({pattern})", text):
        if part in specials:
            yield from _encode(tokenizer, plain, as_plain_text=True)
            yield specials[part]
            plain = ""
        else:
            plain += typed.get(part, part)
    yield from _encode(tokenizer, plain, as_plain_text=True)
