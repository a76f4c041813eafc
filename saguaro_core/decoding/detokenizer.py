"""Text from token ids, one token at a time, exactly equal to one decode of all of them.

Byte-level tokenizers (GPT-2's alphabet: SmolLM2, Llama 3, Qwen) are streams of UTF-8 bytes, so an incremental UTF-8
decoder is exact for them, at once and at constant cost, whatever the ids. Every other tokenizer decodes a short
window: the previous piece as context, then what is new. tokenizers' own DecodeStream serves neither end: it cannot
flush an incomplete tail, and it raises where a byte-fallback token takes back bytes that it has shown.
"""

import codecs
import re
from functools import cache
from typing import Any, Protocol

from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelAlphabet

REPLACEMENT_MARK = "\ufffd"
_FALLBACK_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    @property
    def all_special_ids(self) -> list[int]: ...
    @property
    def added_tokens_decoder(self) -> dict[int, Any]: ...
    def convert_ids_to_tokens(self, ids: int) -> Any: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any: ...


class Detokenizer:
    """Feed ids in order; the pieces joined are the decode of all ids, without special tokens and without clean-up.

    A piece never ends inside a character. What is still open at the end comes from `flush`, as replacement marks.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_byte_level = isinstance(getattr(backend, "decoder", None), ByteLevelDecoder)
        self._tokenizer = tokenizer
        self._special_ids = _special_ids(tokenizer)
        self._pieces = _BytePieces() if is_byte_level else _WindowPieces(tokenizer)

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty for special tokens and while a character is incomplete."""
        if token_id in self._special_ids:
            return ""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return "" if token is None else self._pieces.push(token_id, token)

    @property
    def is_open(self) -> bool:
        """Whether ids were fed whose text is still to come."""
        return self._pieces.is_open

    def flush(self) -> str:
        """The text of an incomplete tail, once; empty when there is none."""
        return self._pieces.flush()


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids))


@cache
def _byte_of_letter() -> dict[str, int]:
    """The byte-level alphabet: a printable byte stands for itself, the others follow in order from U+0100."""
    letters = sorted(ByteLevelAlphabet.alphabet())
    printable = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = sorted(set(range(256)) - set(printable.values()))
    return printable | dict(zip(letters[len(printable) :], others, strict=True))


def _token_bytes(token: str) -> bytes:
    """A token's bytes. An added token may hold letters outside the alphabet; such a token stands for its own text."""
    alphabet = _byte_of_letter()
    if all(letter in alphabet for letter in token):
        return bytes(alphabet[letter] for letter in token)
    return token.encode()


class _BytePieces:
    """Pieces of a byte-level tokenizer."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def is_open(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int, token: str) -> str:
        return self._decoder.decode(_token_bytes(token))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _WindowPieces:
    """Pieces of any other tokenizer, from the decode of the last piece's ids and the new ones.

    The last piece gives the context that decoders look at (is this the first word?). A run of byte-fallback tokens is
    held until it ends: one bad byte turns the whole run into replacement marks.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_context = 0
        self._context = ""
        self.is_open = False

    def push(self, token_id: int, token: str) -> str:
        self._ids.append(token_id)
        self.is_open = _FALLBACK_BYTE.fullmatch(token) is not None
        if self.is_open:
            return ""
        text = self._decode(self._ids)
        self.is_open = text.endswith(REPLACEMENT_MARK)
        return "" if self.is_open else self._advance(text)

    def flush(self) -> str:
        piece = self._advance(self._decode(self._ids)) if self.is_open else ""
        self.is_open = False
        return piece

    def _advance(self, text: str) -> str:
        piece = text[len(self._context) :]
        if piece:
            self._ids = self._ids[self._num_context :]
            self._num_context = len(self._ids)
            self._context = self._decode(self._ids)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
