"""Numbers read off long rows of scores: the compiled loops against torch, ties and filtered scores included."""

import pytest
import torch
from torch import Tensor

from saguaro_core import scores as subject

SIZES = [49152, 8192, 640, 100, 64 * 21, 21]


def rows(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    filtered = torch.rand(2, size, generator=generator) < 0.5
    return [
        torch.randn(3, size, generator=generator) * 4,
        torch.arange(size).float().repeat(2, 1) / size,
        torch.randn(2, size, generator=generator).masked_fill(filtered, -torch.inf),
        torch.full((1, size), 1e4) + torch.randn(1, size, generator=generator),
        torch.randint(0, 3, (2, size), generator=generator).float(),
    ]


def everywhere(scores: Tensor) -> list[Tensor]:
    """The same scores as the compiled loops take them, and as torch has them."""
    assert subject._is_plain(scores)
    return [scores, scores.double()]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 5, 20])
def test_the_largest(size: int, count: int) -> None:
    for scores in rows(size):
        values, indices = subject.largest(scores, count)
        assert torch.equal(values, scores.topk(count).values)
        kept = values.isfinite()  # Of filtered scores only the value is right.
        assert torch.equal(scores.gather(1, indices)[kept], values[kept])
        finite = [row[value.isfinite()].tolist() for row, value in zip(indices, values, strict=True)]
        assert all(len(set(row)) == len(row) for row in finite)


def test_of_equal_scores_the_first_come_first() -> None:
    assert subject.largest(torch.ones(1, 200), 3)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.3, 1.7])
def test_totals_and_probabilities(size: int, temperature: float) -> None:
    for scores in rows(size):
        expected = (scores.double() / temperature).softmax(-1)
        for given in everywhere(scores):
            totals = subject.log_totals(given, temperature)
            assert torch.allclose(totals.double(), (scores.double() / temperature).logsumexp(-1), rtol=2e-6)
            columns = [size - 1 - row for row in range(len(scores))]
            found = subject.probabilities_of(given, columns, temperature)
            wanted = [float(expected[row, column]) for row, column in enumerate(columns)]
            # A score of 10,000 has steps of 0.001 in single precision.
            assert found == pytest.approx(wanted, rel=2e-2 if float(scores.max()) > 1e3 else 1e-4, abs=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 1.7])
def test_point_masses(temperature: float) -> None:
    for scores in (torch.randn(4, 700) * 3, torch.full((4, 64), -5.0)):
        before = (scores.double() / temperature).softmax(-1)
        for given in everywhere(scores.clone()):
            mixed = subject.with_point_masses(given.clone(), [0, 3], [7, 9], [0.25, 0.9], temperature)
            after = (mixed.double() / temperature).softmax(-1)
            for row, column, weight in ((0, 7, 0.25), (3, 9, 0.9)):
                expected = before[row] * (1 - weight)
                expected[column] += weight
                assert torch.allclose(after[row], expected, atol=1e-6)
            assert torch.equal(mixed[1:3].double(), given[1:3].double())
