"""Processed distributions, and the randomness that samples from them.

Target and draft pass their logits through the same `process_logits`; the sampler and the verifier use its result, so
there is one definition of p and one of q. All randomness comes from Philox counters keyed by (seed, stream,
position): nothing is stateful, so every process, device and mode draws the same numbers for the same position.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from saguaro_core.config import SamplingParams

GREEDY_BELOW = 1e-5
_LOOKS = (256, 4096)
_NOISE_ROWS_KEPT = 96


class Stream(IntEnum):
    """Independent random streams of one request."""

    GUMBEL = 0
    ACCEPT = 1
    TARGET = 2
    DRAFT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Processing:
    """Temperature, top-k and top-p as applied to both models; the part of SamplingParams that shapes p and q."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, params: SamplingParams) -> "Processing":
        """The processing that a request asks for."""
        return cls(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)

    @property
    def is_greedy(self) -> bool:
        """Temperature 0, and temperatures so small that dividing by them could overflow."""
        return self.temperature < GREEDY_BELOW


def process_logits(logits: Tensor, processing: Processing) -> Tensor:
    """Scores [..., V] in float32 whose softmax is the processed distribution; filtered tokens are -inf.

    Tokens that tie with the last one kept by top-k or top-p are kept, so the result does not depend on any
    sorting order. Greedy processing returns the logits as they are: only their argmax is ever used.
    """
    scores = logits.float()
    if processing.is_greedy:
        return scores
    scores = scores / processing.temperature
    if 0 < processing.top_k < scores.shape[-1]:
        kth = scores.topk(processing.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if processing.top_p < 1.0:
        scores = scores.masked_fill(scores < _nucleus_threshold(scores, processing.top_p), -torch.inf)
    return scores


def _nucleus_threshold(scores: Tensor, top_p: float) -> Tensor:
    """Smallest score [..., 1] in the smallest set of top tokens whose mass reaches top_p.

    Looks at the best few first, then at more, and sorts the whole vocabulary only where they do not reach top_p.
    """
    log_total = scores.logsumexp(-1, keepdim=True)
    for size in (*(look for look in _LOOKS if look < scores.shape[-1]), scores.shape[-1]):
        best = scores.topk(size, dim=-1).values
        mass = (best - log_total).exp().cumsum(-1)
        if bool((mass[..., -1] >= top_p).all()):
            break
    last = (mass < top_p).sum(-1, keepdim=True).clamp(max=best.shape[-1] - 1)
    return best.gather(-1, last)


def best_tokens(scores: Tensor) -> list[int]:
    """The index of the largest score in each row of scores [m, V]; the first of equal ones."""
    if scores.device.type == "cpu":
        best: list[int] = scores.numpy().argmax(-1).tolist()  # Ten times as fast as torch's on a long row.
        return best
    return scores.argmax(-1).tolist()


def philox(seed: int, stream: Stream, position: int, lane: int = 0) -> np.random.Philox:
    """The counter-based generator of one (seed, stream, position); `lane` separates uses that share a position."""
    return np.random.Philox(key=seed, counter=np.array([0, position, stream, lane], dtype=np.uint64))


def uniforms(seed: int, stream: Stream, position: int, count: int, lane: int = 0) -> np.ndarray:
    """`count` float64 numbers in [0, 1) with 53 random bits each."""
    bits = philox(seed, stream, position, lane).random_raw(count)
    return (bits >> np.uint64(11)) * 2.0**-53


class GumbelNoise:
    """The shared noise g_n of one seed: a Gumbel vector [V] per absolute position n (arXiv 2408.07978).

    The value of a token depends on (seed, n, token) alone, not on V.

    Made on the CPU in float64 and rounded once to float32, so that both processes hold equal rows whatever their
    device.
    """

    def __init__(
        self, seed: int, size: int, device: torch.device | str = "cpu", token_ids: Tensor | None = None
    ) -> None:
        self.seed, self.size, self.device = seed, size, torch.device(device)
        self._token_ids = token_ids
        self._rows: OrderedDict[int, Tensor] = OrderedDict()

    def row(self, position: int) -> Tensor:
        """g at one position: [V], or [len(token_ids)] for a trimmed head. Rows are kept until newer ones replace
        them.
        """
        row = self._rows.get(position)
        if row is None:
            row = self._rows[position] = self._make(position)
            if len(self._rows) > _NOISE_ROWS_KEPT:
                self._rows.popitem(last=False)
        return row

    def rows(self, positions: list[int]) -> Tensor:
        """Rows of several positions, stacked: [len(positions), V]."""
        return torch.stack([self.row(position) for position in positions])

    def _make(self, position: int) -> Tensor:
        bits = philox(self.seed, Stream.GUMBEL, position).random_raw(self.size)
        if self._token_ids is not None:
            bits = bits[self._token_ids.numpy()]
        # Centred on the 2^52 grid: never 0 and never 1, so both logarithms are finite. On a finer grid the last
        # centre would round to 1.
        uniform = torch.from_numpy(((bits >> np.uint64(12)) + 0.5) * 2.0**-52)
        return uniform.log_().neg_().log_().neg_().float().to(self.device)


def sample(weights: Tensor, draws: np.ndarray) -> list[int]:
    """One token for each row of unnormalised weights [m, V], by inverting cumulative sums at `draws` [m] in [0, 1).

    A token of weight 0 is never drawn. Raises ValueError for a row without a positive weight.
    """
    cumulative = weights.double().cumsum(-1)
    totals = cumulative[:, -1:]
    if not bool((totals > 0).all()):
        raise ValueError(f"weights sum to {totals.min().item()}: a distribution needs at least one positive weight.")
    targets = totals * torch.from_numpy(draws).to(totals.device).unsqueeze(1)
    # Rounding may lift a target to its total: the largest number below it still falls on a positive weight.
    targets = torch.minimum(targets, torch.nextafter(totals, torch.zeros_like(totals)))
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1).tolist()


def saguaro_weights(q: Tensor, num_cached: int, c: float) -> Tensor:
    """Saguaro's q' (Definition 14): the `num_cached` best tokens of q [..., V] weigh C times as much; normalised
    again.
    """
    if c == 1.0 or num_cached <= 0:
        return q
    best = q.topk(min(num_cached, q.shape[-1]), dim=-1).indices
    reduced = q.scatter(-1, best, q.gather(-1, best) * c)
    total = reduced.sum(-1, keepdim=True)
    # With C = 0 and every token among the cached ones nothing would be left to draw: q itself serves.
    return torch.where(total > 0, reduced / total.clamp_min(torch.finfo(q.dtype).tiny), q)
