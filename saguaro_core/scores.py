"""Reads a few numbers off long rows of scores: by compiled loops on the CPU, by torch elsewhere."""

import numpy as np
import torch
from torch import Tensor

from saguaro_core.models.native import scores as compiled


def _is_plain(scores: Tensor) -> bool:
    return scores.device.type == "cpu" and scores.dtype == torch.float32 and scores.is_contiguous()


def prepare() -> None:
    """Compile the loops now, or read them from their cache: the first run must not wait for that."""
    few = torch.zeros(1, 8)
    largest(few, 1)
    with_point_masses(few, [0], [0], [0.5])


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of scores [m, n], falling: values and indices, [m, count] each."""
    if not _is_plain(scores):
        best = scores.topk(count, dim=-1)
        return best.values, best.indices
    values = np.empty((len(scores), count), np.float32)
    indices = np.zeros((len(scores), count), np.int64)
    compiled.find_largest(scores.numpy(), values, indices)
    return torch.from_numpy(values), torch.from_numpy(indices)


def log_totals(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """log of the sum of exp(scores / temperature) for each row of scores [m, n]: [m]."""
    if not _is_plain(scores):
        return (scores / temperature).logsumexp(-1)
    found = np.empty(len(scores), np.float32)
    compiled.find_log_totals(scores.numpy(), np.float32(1.0 / temperature), found)
    return torch.from_numpy(found)


def probabilities_of(scores: Tensor, columns: list[int], temperature: float = 1.0) -> list[float]:
    """softmax(scores / temperature) at one column of each row of scores [m, n]."""
    column = torch.tensor(columns, device=scores.device).unsqueeze(-1)
    chosen = scores.gather(-1, column).squeeze(-1) / temperature
    return _probabilities(chosen, log_totals(scores, temperature))


def likeliest(
    scores: Tensor, columns: list[int], count: int, temperature: float = 1.0
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """softmax(scores / temperature) of scores [m, n] at one column of each row, and at its `count` largest, as
    (column, probability).
    """
    totals = log_totals(scores, temperature)
    column = torch.tensor(columns, device=scores.device).unsqueeze(-1)
    p = _probabilities(scores.gather(-1, column).squeeze(-1) / temperature, totals)
    if count == 0:
        return p, [[] for _ in p]
    values, indices = largest(scores, min(count, scores.shape[-1]))
    best = (values / temperature - totals.unsqueeze(-1)).clamp(max=0.0).exp()
    return p, [list(zip(*row, strict=True)) for row in zip(indices.tolist(), best.tolist(), strict=True)]


def _probabilities(scaled: Tensor, totals: Tensor) -> list[float]:
    # Scale and total are rounded apart, which must not make more than 1 of a sure token.
    found: list[float] = (scaled - totals).clamp(max=0.0).exp().tolist()
    return found


def with_point_masses(
    scores: Tensor, rows: list[int], columns: list[int], weights: list[float], temperature: float = 1.0
) -> Tensor:
    """Scores [m, n] of which softmax(scores / temperature) is (1 - w) of what it was and w more on one column, in some
    rows. On the CPU the given scores themselves change.
    """
    log_odds = np.log(weights) - np.log1p(-np.array(weights))
    if _is_plain(scores):
        places = np.array(rows), np.array(columns)
        compiled.lift(scores.numpy(), *places, log_odds.astype(np.float32), np.float32(1.0 / temperature))
        return scores
    row, column = (torch.tensor(values, device=scores.device) for values in (rows, columns))
    own = scores[row, column] / temperature
    lifted = log_totals(scores[row], temperature) + torch.from_numpy(log_odds).to(scores)
    return scores.index_put((row, column), torch.logaddexp(own, lifted) * temperature)
