"""What the text so far offers the draft: lookups after a miss, and copies in its distributions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from saguaro_core.copying import CopyGuide, CopyWeights
from saguaro_core.draft.proposer import Proposer
from saguaro_core.fallback import FastBackup, LookupKind
from saguaro_core.ngrams import MAX_NGRAM
from saguaro_core.pair_table import PairMemory


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that should come next, how it was found, and the probability that it is right."""

    kind: Literal["ngram", "pair"]
    token_id: int
    share: float


@dataclass(slots=True)
class Experience:
    """What answers taught about the target and the draft; it outlives requests.

    As with pairs, what an answer taught counts from the next prompt on, so that the lanes of a comparison start alike.
    """

    pairs: PairMemory = field(default_factory=PairMemory)
    _settled: CopyWeights = field(default_factory=CopyWeights)
    _latest: CopyWeights = field(default_factory=CopyWeights)
    _prompt: tuple[int, ...] = ()

    def weights(self, prompt: Sequence[int]) -> CopyWeights:
        """Weights for an answer to `prompt`."""
        if tuple(prompt) != self._prompt:
            self._prompt, self._settled = tuple(prompt), self._latest
        self._latest = self._settled.copy()
        return self._latest


class TextMemory:
    """Prompt and answer of one request. `copying`: whether copies are wanted.

    Where tokens are drawn from the draft they depend on what is proposed: a run must then not say other things because
    of answers before it, so what those taught is left out.
    """

    def __init__(self, prompt: Sequence[int], experience: Experience, proposer: Proposer, *, copying: bool) -> None:
        self._backup = FastBackup(prompt, experience.pairs, alone=proposer.draws_tokens)
        weights = CopyWeights() if proposer.draws_tokens else experience.weights(prompt)
        processing = proposer.processing
        temperature = 1.0 if processing.is_greedy else processing.temperature
        self._guide = CopyGuide(self._backup.ngrams, proposer.column_of, temperature, weights)
        self._copying = copying

    def learn(self, committed: Sequence[int], q: Sequence[float]) -> None:
        """Append tokens that the target committed; q: of the draft's own tokens that were proposed in their places."""
        self._guide.observe(committed, q if self._copying else ())
        self._backup.extend(committed)

    def look_up(self, count: int) -> tuple[LookupKind, list[int]]:
        """Up to `count` tokens that should come next, and where they were found."""
        return self._backup.propose(count)

    def guess(self, text: Sequence[int], *, after_hit: bool) -> Guess | None:
        """What most likely follows `text` by the text alone. After a hit only copies are looked for, if they are
        wanted; after a miss the pair table too.
        """
        copied = self._guide.guess(text[-MAX_NGRAM:]) if self._copying or not after_hit else None
        pair = None if after_hit else self._backup.guess_pair(text[-1])
        if copied is not None and (pair is None or copied[1] >= pair[1]):
            return Guess("ngram", *copied)
        return None if pair is None else Guess("pair", *pair)

    def mix(self, logits: Tensor, text: Sequence[int]) -> Tensor:
        """The draft's logits [m, n] after the last m ends of `text`, its own included, with copies in them."""
        ends = range(len(text) + 1 - len(logits), len(text) + 1)
        return self.mix_tails(logits, [text[max(0, end - MAX_NGRAM) : end] for end in ends])

    def mix_tails(self, logits: Tensor, tails: Sequence[Sequence[int]]) -> Tensor:
        """The same for rows of different texts, of which these are the last tokens (8, if there are so many)."""
        return self._guide.mix(logits, tails) if self._copying else logits
