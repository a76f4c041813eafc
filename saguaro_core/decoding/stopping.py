"""Where an answer ends: from committed token ids to the tokens that may be shown, and the reason to stop.

The outcome depends on the sequence of tokens alone, never on how rounds cut it into blocks. Within a block position
decides: the token that first ends the answer ends it, and nothing behind it is kept. At one and the same token,
end of turn comes before a stop string, and a stop string before the cap.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from saguaro_core.decoding.detokenizer import Detokenizer

Payload = TypeVar("Payload")
EndReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedToken(Generic[Payload]):
    """A token whose text is final; `payload` is the object that it was pushed with."""

    index: int
    token_id: int
    text: str
    payload: Payload


@dataclass(slots=True)
class _PendingToken(Generic[Payload]):
    token_id: int
    text: str
    payload: Payload


class AnswerBuilder(Generic[Payload]):
    """Takes the tokens of each round and releases them in order once their text can no longer change.

    Text that could still become a stop string is held back with its tokens. When a stop string completes, the text ends
    before it and the ids end with the token that completes it. An end-of-turn token is kept with an empty text.
    `context_room` is how many tokens still fit into the model's context after the prompt.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        eos_token_ids: Iterable[int],
        stop: Sequence[str],
        max_new_tokens: int,
        context_room: int,
    ) -> None:
        self._limit = min(max_new_tokens, context_room)
        if self._limit < 1:
            raise ValueError(
                f"max_new_tokens is {max_new_tokens} and context_room {context_room}: give at least 1 of each."
            )
        self._detokenizer = detokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._matcher = _StopMatcher(stop)
        self._pending: list[_PendingToken[Payload]] = []
        self._token_ids: list[int] = []
        self._released_text: list[str] = []
        self._num_released = 0
        self._is_closed = False
        self._stop_reason: EndReason | None = None

    @property
    def stop_reason(self) -> EndReason | None:
        """Why the answer ended by itself; None while it goes on, and when `finish` cut it."""
        return self._stop_reason

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids of the answer, those held back included."""
        return tuple(self._token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_remaining(self) -> int:
        """How many more tokens may be committed; a round need not draft beyond it."""
        return 0 if self._is_closed else self._limit - len(self._token_ids)

    @property
    def text(self) -> str:
        """The text released so far; the whole answer once it has ended."""
        return "".join(self._released_text)

    def push(self, committed: Iterable[tuple[int, Payload]]) -> list[ReleasedToken[Payload]]:
        """Add a round's tokens, each with its payload, and return what may be shown now."""
        for token_id, payload in committed:
            if self._is_closed:
                break
            self._add(token_id, payload)
        return self._release()

    def finish(self) -> list[ReleasedToken[Payload]]:
        """End the answer where it is (stopped or failed) and return all that was held back; nothing after an end."""
        if not self._is_closed:
            self._append_tail()
            self._is_closed = True
        return self._release()

    def _add(self, token_id: int, payload: Payload) -> None:
        self._token_ids.append(token_id)
        if token_id in self._eos_token_ids:
            self._append_tail()
            self._pending.append(_PendingToken(token_id, "", payload))
            self._end("eos")
            return
        text = self._detokenizer.push(token_id)
        self._pending.append(_PendingToken(token_id, text, payload))
        surplus = self._matcher.feed(text)
        if surplus is not None:
            self._cut(surplus)
            self._end("stop")
        elif len(self._token_ids) == self._limit:
            self._append_tail()
            self._end("length")

    def _end(self, reason: EndReason) -> None:
        self._stop_reason = reason
        self._is_closed = True

    def _append_tail(self) -> None:
        """Give the text of an incomplete character to the last token. It is no match for a stop string."""
        tail = self._detokenizer.flush()
        if tail:
            self._pending[-1].text += tail

    def _cut(self, surplus: int) -> None:
        """Take the last characters off the held text: a stop string is always held whole."""
        for token in reversed(self._pending):
            kept = max(0, len(token.text) - surplus)
            surplus -= len(token.text) - kept
            token.text = token.text[:kept]

    def _release(self) -> list[ReleasedToken[Payload]]:
        count = len(self._pending) if self._is_closed else self._num_settled()
        released = [
            ReleasedToken(index=index, token_id=token.token_id, text=token.text, payload=token.payload)
            for index, token in enumerate(self._pending[:count], start=self._num_released)
        ]
        del self._pending[:count]
        self._num_released += count
        self._released_text.extend(token.text for token in released)
        return released

    def _num_settled(self) -> int:
        """How many pending tokens, from the first, can be released.

        The newest token waits while a character is open: it must be there to take the tail, should the answer end.
        """
        candidates = len(self._pending) - int(self._detokenizer.is_open)
        safe = sum(len(token.text) for token in self._pending) - self._matcher.num_held
        for count, token in enumerate(self._pending[:candidates]):
            safe -= len(token.text)
            if safe < 0:
                return count
        return candidates


class _StopMatcher:
    """Finds the earliest completion of any stop string in a growing text (Knuth, Morris and Pratt, one per string)."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._borders = [_border_lengths(text) for text in self._stop]
        self._matched = [0] * len(self._stop)

    @property
    def num_held(self) -> int:
        """How many of the last characters could still become a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> int | None:
        """Read on; at a completion, how many of the characters read so far do not belong to the answer.

        Of several that complete at the same character the longest counts, so that no part of one is shown.
        """
        if not self._stop:
            return None
        for position, character in enumerate(text, start=1):
            completed = [len(stop) for index, stop in enumerate(self._stop) if self._advance(index, character)]
            if completed:
                return max(completed) + len(text) - position
        return None

    def _advance(self, index: int, character: str) -> bool:
        stop, matched = self._stop[index], self._matched[index]
        while matched and stop[matched] != character:
            matched = self._borders[index][matched - 1]
        self._matched[index] = matched + (stop[matched] == character)
        return self._matched[index] == len(stop)


def _border_lengths(text: str) -> list[int]:
    """For each prefix of the text, the length of its longest proper border (both prefix and suffix of it)."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        length += text[index] == text[length]
        borders[index] = length
    return borders
