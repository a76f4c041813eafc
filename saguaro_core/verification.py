"""The two lossless rules: given the target's scores and a speculation, decide the outcome (k, t*).

Both are exact: whatever the draft proposes, the tokens follow the target's processed distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from saguaro_core.sampling import best_tokens, sample


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one verification decides: `accepted` = k drafted tokens stand, then the target's own token t*."""

    accepted: int
    bonus_token_id: int


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """q of a speculation, exactly as its tokens were drawn: `probabilities` [K, n] over `token_ids` [n].

    `token_ids` None means the identity. A deterministic proposal (an n-gram) has no distributions: it is a point mass.
    """

    probabilities: Tensor
    token_ids: Tensor | None = None

    def over_vocabulary(self, vocabulary_size: int, device: torch.device) -> Tensor:
        """q as [K, V] on the target's device."""
        q = self.probabilities.to(device)
        if self.token_ids is None:
            missing = vocabulary_size - q.shape[-1]
            return torch.nn.functional.pad(q, (0, missing)) if missing > 0 else q[..., :vocabulary_size]
        dense = q.new_zeros(q.shape[0], vocabulary_size)
        return dense.index_copy_(1, self.token_ids.to(device), q)


def verify_coupled(scores: Tensor, noise: Tensor | None, drafted: list[int]) -> Outcome:
    """Shared-noise rule (Daliri, Musco, Suresh, arXiv 2408.07978); with noise None the greedy rule of temperature 0.

    scores and noise: [1 + K, V]. The target's token at each position is argmax(score + noise), an exact sample of p;
    drafted tokens stand while they equal it, and t* is the target's token at the first difference.
    """
    own = best_tokens(scores if noise is None else scores + noise)
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == own[accepted]:
        accepted += 1
    return Outcome(accepted, own[accepted])


def verify_rejection(
    p: Tensor, q: Tensor | None, drafted: list[int], accept_uniforms: Sequence[float], bonus_uniforms: Sequence[float]
) -> Outcome:
    """Rejection sampling (Leviathan 2023, Chen 2023) on processed distributions.

    p: [1 + K, V]; q: [K, V], or None for a deterministic proposal (q = 1 on each drafted token). x_i stands with
    probability min(1, p/q); at the first rejection t* is drawn from norm(max(p - q, 0)), after K acceptances from p.
    The uniforms, one of each kind per position, must be independent of each other and of whatever drew the drafted
    tokens.
    """
    for i, token in enumerate(drafted):
        p_token = float(p[i, token])
        q_token = 1.0 if q is None else float(q[i, token])
        # Strictly below: a uniform of exactly 0 must not accept a token of probability 0.
        if accept_uniforms[i] * q_token < p_token:
            continue
        return Outcome(i, _draw(_residual(p[i], None if q is None else q[i], token), bonus_uniforms[i]))
    k = len(drafted)
    return Outcome(k, _draw(p[k], bonus_uniforms[k]))


def _draw(weights: Tensor, uniform: float) -> int:
    return sample(weights.unsqueeze(0), np.array([uniform]))[0]


def _residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """max(p - q, 0) [V]; p itself where rounding leaves nothing (p and q equal up to their last bits)."""
    if q is None:
        residual = p.clone()
        residual[token] = 0.0
    else:
        residual = (p - q).clamp_min(0.0)
    return residual if bool(residual.sum() > 0) else p
