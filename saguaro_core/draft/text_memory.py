"""What the text so far offers the draft: lookups after a miss, and copies in its distributions."""

from collections.abc import Sequence

from torch import Tensor

from saguaro_core.copying import CopyGuide
from saguaro_core.draft.proposer import Proposer
from saguaro_core.fallback import FastBackup, LookupKind
from saguaro_core.ngrams import MAX_NGRAM
from saguaro_core.pair_table import PairMemory


class TextMemory:
    """Prompt and answer of one request. `copying`: whether copies are wanted.

    Where tokens are drawn from the draft they depend on what is proposed: a run must then not say other things because
    of answers before it, so pairs of earlier answers are left out.
    """

    def __init__(self, prompt: Sequence[int], pairs: PairMemory, proposer: Proposer, *, copying: bool) -> None:
        self._backup = FastBackup(prompt, pairs, alone=proposer.draws_tokens)
        processing = proposer.processing
        temperature = 1.0 if processing.is_greedy else processing.temperature
        self._copies = CopyGuide(self._backup.ngrams, proposer.column_of, temperature) if copying else None

    def learn(self, committed: Sequence[int]) -> None:
        """Append tokens that the target committed."""
        if self._copies is not None:
            self._copies.observe(committed)
        self._backup.extend(committed)

    def look_up(self, count: int) -> tuple[LookupKind, list[int]]:
        """Up to `count` tokens that should come next, and where they were found."""
        return self._backup.propose(count)

    def mix(self, logits: Tensor, text: Sequence[int]) -> Tensor:
        """The draft's logits [m, n] after the last m ends of `text`, its own included, with copies in them."""
        ends = range(len(text) + 1 - len(logits), len(text) + 1)
        return self.mix_tails(logits, [text[max(0, end - MAX_NGRAM) : end] for end in ends])

    def mix_tails(self, logits: Tensor, tails: Sequence[Sequence[int]]) -> Tensor:
        """The same for rows of different texts, of which these are the last tokens (8, if there are so many)."""
        return logits if self._copies is None else self._copies.mix(logits, tails)
