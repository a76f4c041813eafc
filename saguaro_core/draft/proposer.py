"""Turns draft logits into drafted tokens, and into the ranking that predicts bonus tokens.

Under shared noise both come from log q_n + g_n; under rejection sampling tokens are drawn from q' and candidates are
ranked by q.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from saguaro_core.config import SamplingParams, SpeculationConfig
from saguaro_core.sampling import (
    GumbelNoise,
    Processing,
    Stream,
    best_tokens,
    process_logits,
    saguaro_weights,
    sample,
    uniforms,
)
from saguaro_core.scores import probabilities_of

# Filtered tokens rank after all others, in their own order: they are still the best guesses left.
_FILTERED_PENALTY = 1e4


@dataclass(frozen=True, slots=True)
class Place:
    """Which drafted token of a request a row makes, so that the same one is drawn in whatever forward it comes up.

    (round_index, lane, row) names the random number: no two tokens may share it. num_cached: F of the position in the
    coming cache, for Saguaro's q'.
    """

    round_index: int
    lane: int
    row: int = 0
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Draws:
    """What one forward of m rows gave, n being the columns of the draft's head.

    columns: the chosen column of each row. probabilities: q of each of them at the run's temperature (1 for a greedy
    run), before filters. rank_scores: [m, n]. q: [m, n] as drawn from, None for a deterministic choice.
    """

    columns: list[int]
    probabilities: list[float]
    rank_scores: Tensor
    q: Tensor | None


class Proposer:
    """Draws tokens for one request. `num_columns` is the draft head's width, `token_ids` its map to target ids
    (None: identity).
    """

    def __init__(
        self,
        sampling: SamplingParams,
        speculation: SpeculationConfig,
        *,
        num_columns: int,
        token_ids: Tensor | None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.processing = Processing.of(sampling)
        self.seed = sampling.seed
        self.saguaro_c = speculation.saguaro_c
        self.num_columns = num_columns
        self._is_rejection = speculation.rule == "rejection" and not self.processing.is_greedy
        self._noise: GumbelNoise | None = None
        if not self.processing.is_greedy and not self._is_rejection:
            # A row's numbers do not depend on its length, so the draft need not know how long the target's rows are.
            size = num_columns if token_ids is None else int(token_ids.max()) + 1
            self._noise = GumbelNoise(sampling.seed, size, device, token_ids)
        self.target_ids: list[int] = list(range(num_columns)) if token_ids is None else token_ids.tolist()
        self.column_of: dict[int, int] = {token: column for column, token in enumerate(self.target_ids)}

    @property
    def draws_tokens(self) -> bool:
        """Whether tokens are drawn from the draft's distribution: what is said then depends on what was drafted."""
        return self._is_rejection

    def draw(self, logits: Tensor, positions: list[int], places: Sequence[Place]) -> Draws:
        """Choose a token for each row of logits [m, n]; `positions`: the absolute position that each row predicts."""
        scores = process_logits(logits, self.processing)
        rank_scores = self._rank_scores(logits, scores, positions)
        if not self._is_rejection:
            # Filtered tokens stay behind all others in rank_scores, so its best is the best of the processed scores.
            columns = best_tokens(rank_scores)
            return Draws(columns, self._probabilities(logits, columns), rank_scores, None)
        q = scores.softmax(-1)
        if self.saguaro_c != 1.0:
            q = torch.stack(
                [saguaro_weights(row, p.num_cached, self.saguaro_c) for row, p in zip(q, places, strict=True)]
            )
        columns = sample(q, self._uniforms(places))
        return Draws(columns, self._probabilities(logits, columns), rank_scores, q)

    def _uniforms(self, places: Sequence[Place]) -> np.ndarray:
        """One number for each place, read from the streams that the places name."""
        longest = 1 + max(place.row for place in places)
        forwards = {(place.round_index, place.lane) for place in places}
        streams = {(index, lane): uniforms(self.seed, Stream.DRAFT, index, longest, lane) for index, lane in forwards}
        return np.array([streams[place.round_index, place.lane][place.row] for place in places])

    def rank_scores(self, logits: Tensor, positions: list[int]) -> Tensor:
        """What ranks candidates for the bonus token at each of the positions that logits [m, n] predict: [m, n]."""
        return self._rank_scores(logits, process_logits(logits, self.processing), positions)

    def _rank_scores(self, logits: Tensor, scores: Tensor, positions: list[int]) -> Tensor:
        if not self.processing.is_greedy and (self.processing.top_k or self.processing.top_p < 1.0):
            scores = torch.where(scores.isinf(), logits / self.processing.temperature - _FILTERED_PENALTY, scores)
        return scores if self._noise is None else scores + self._noise.rows(positions)

    def _probabilities(self, logits: Tensor, columns: list[int]) -> list[float]:
        """q of one column for each row of logits [m, n]."""
        return probabilities_of(logits, columns, 1.0 if self.processing.is_greedy else self.processing.temperature)

    def candidates(self, rank_scores: Tensor, count: int, excluded: set[int]) -> list[int]:
        """The `count` best target ids under rank_scores [n], without the excluded ones."""
        if count <= 0:
            return []
        best = rank_scores.topk(min(count + len(excluded), self.num_columns)).indices.tolist()
        allowed = (self.target_ids[column] for column in best if self.target_ids[column] not in excluded)
        return [token for token, _ in zip(allowed, range(count), strict=False)]

    def rank(self, rank_scores: Tensor, token_id: int, drafted: int | None) -> int | None:
        """1-based place of a target id among the candidates (the drafted token is not one); None if the head lacks
        it.
        """
        column = self.column_of.get(token_id)
        if column is None:
            return None
        better = int((rank_scores > rank_scores[column]).sum())
        drafted_column = None if drafted is None else self.column_of.get(drafted)
        if drafted_column is not None and rank_scores[drafted_column] > rank_scores[column]:
            better -= 1
        return better + 1
