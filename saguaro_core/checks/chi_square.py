"""Chi-square tests with a stated false-alarm rate."""

from collections.abc import Mapping, Sequence

import torch

# Every single check of the distribution tests may fail by chance at most this often; all of them together stay below
# 1e-6.
FALSE_ALARM = 1e-9


def chi_square_p_value(observed: Sequence[float], expected: Sequence[float]) -> float:
    """P(chi-square at least this large) for counts under expected counts; cells expected below 5 are pooled.

    A count where nothing is expected makes it 0.
    """
    pairs = list(zip(observed, expected, strict=True))
    if any(o > 0 and e == 0 for o, e in pairs):
        return 0.0
    large = [(o, e) for o, e in pairs if e >= 5]
    small = [(o, e) for o, e in pairs if 0 < e < 5]
    pooled = (sum(o for o, _ in small), sum(e for _, e in small))
    cells = large + ([pooled] if pooled[1] > 0 else [])
    if len(cells) < 2:
        return 1.0
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def histogram_p_value(tokens: Sequence[int], distribution: Sequence[float]) -> float:
    """p-value of a sample of tokens under a distribution over 0..V-1."""
    counts = [tokens.count(token) for token in range(len(distribution))]
    return chi_square_p_value(counts, [p * len(tokens) for p in distribution])


def transitions_p_value(pairs: Sequence[tuple[int, int]], rows: Mapping[int, Sequence[float]]) -> float:
    """p-value of (state, next token) pairs under one distribution for each state."""
    observed: list[float] = []
    expected: list[float] = []
    freedom = 0
    for state, row in rows.items():
        following = [token for before, token in pairs if before == state]
        if sum(p > 0 for p in row) * 5 > len(following):
            continue
        observed += [following.count(token) for token in range(len(row))]
        expected += [p * len(following) for p in row]
        freedom += sum(p > 0 for p in row) - 1
    if any(o > 0 and e == 0 for o, e in zip(observed, expected, strict=True)):
        return 0.0
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e > 0)
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])) if freedom else 1.0
