"""Processed distributions and the random numbers behind them."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import EXACT, distributions

from saguaro_core import sampling
from saguaro_core.config import SamplingParams
from saguaro_core.sampling import (
    GREEDY_BELOW,
    GumbelNoise,
    Processing,
    Stream,
    process_logits,
    saguaro_weights,
    sample,
    uniforms,
)


def reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Temperature, then top-k, then top-p, one token at a time; ties with the last kept token are kept."""
    kept = dict(enumerate(value / temperature for value in logits))
    if top_k:
        kth = sorted(kept.values(), reverse=True)[min(top_k, len(kept)) - 1]
        kept = {token: value for token, value in kept.items() if value >= kth}
    largest = max(kept.values())
    weights = {token: math.exp(value - largest) for token, value in kept.items()}
    total, mass, last = sum(weights.values()), 0.0, 0.0
    for weight in sorted(weights.values(), reverse=True):
        if mass >= top_p * total:
            break
        mass, last = mass + weight, weight
    nucleus = {token: weight for token, weight in weights.items() if weight >= last}
    return [nucleus.get(token, 0.0) / sum(nucleus.values()) for token in range(len(logits))]


class TestProcessing:
    @pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
    @pytest.mark.parametrize("top_k", [0, 1, 2, 5, 300, 999, 1000, 5000])
    @pytest.mark.parametrize("top_p", [1e-4, 0.1, 0.6, 0.95, 0.999, 1.0])
    def test_agrees_with_a_naive_reference(self, temperature: float, top_k: int, top_p: float) -> None:
        generator = torch.Generator().manual_seed(top_k)
        # Flat at the end: top_p 0.999 needs more than the first look of 256 tokens.
        logits = torch.randn(2, 1000, generator=generator)
        scores = process_logits(logits, Processing(temperature=temperature, top_k=top_k, top_p=top_p))
        assert scores.dtype == torch.float32
        for row, row_logits in zip(scores.softmax(-1).tolist(), logits.tolist(), strict=True):
            expected = reference(row_logits, temperature, top_k, top_p)
            assert [p > 0 for p in row] == [p > 0 for p in expected]
            assert row == pytest.approx(expected, rel=2e-4, abs=1e-7)

    def test_a_nucleus_beyond_the_first_look_was_tested(self) -> None:
        flat = torch.zeros(1000).index_fill(0, torch.arange(500), 1.0)
        kept = process_logits(flat, Processing(temperature=1.0, top_p=0.9)).isfinite()
        assert int(kept.sum()) == 1000
        kept = process_logits(flat, Processing(temperature=1.0, top_p=0.5)).isfinite()
        assert kept.nonzero().flatten().tolist() == list(range(500))

    def test_ties_with_the_last_one_kept_are_kept_wherever_they_stand(self) -> None:
        logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, -1.0, 1.0])
        assert process_logits(logits, Processing(temperature=1.0, top_k=1)).isfinite().nonzero().flatten().tolist() == [
            1,
            3,
        ]
        kept = process_logits(logits, Processing(temperature=1.0, top_k=3)).isfinite()
        assert kept.nonzero().flatten().tolist() == [1, 2, 3, 4, 6]
        kept = process_logits(logits, Processing(temperature=1.0, top_p=0.7)).isfinite()
        assert kept.nonzero().flatten().tolist() == [1, 2, 3, 4, 6]
        shuffled = torch.tensor([4, 2, 6, 0, 1, 5, 3])
        again = process_logits(logits[shuffled], Processing(temperature=1.0, top_p=0.7)).isfinite()
        assert torch.equal(again, kept[shuffled])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6, GREEDY_BELOW, 1e-4, 0.01])
    @pytest.mark.parametrize("top_p", [1.0, 1e-4])
    @pytest.mark.parametrize("top_k", [0, 3])
    def test_temperatures_near_zero_are_never_nan(
        self, temperature: float, top_p: float, top_k: int, dtype: torch.dtype
    ) -> None:
        rows = torch.tensor(
            [[0.0, 0.0, 0.0, 0.0, 0.0], [1e4, -1e4, 0.0, 1.0, 2.0], [30.0, 29.9, -40.0, 0.0, 1e-3]], dtype=dtype
        )
        processing = Processing(temperature=temperature, top_k=top_k, top_p=top_p)
        scores = process_logits(rows, processing)
        probabilities = scores.softmax(-1)
        assert not scores.isnan().any()
        assert not probabilities.isnan().any()
        assert torch.allclose(probabilities.sum(-1), torch.ones(3))
        assert torch.equal(scores.argmax(-1), rows.float().argmax(-1))
        drawn = sample(probabilities, np.array([0.0, 0.5, 1 - 2.0**-53]))
        assert all(probabilities[row, token] > 0 for row, token in enumerate(drawn))

    def test_below_a_small_temperature_processing_is_greedy(self) -> None:
        logits = torch.tensor([1.0, 3.0, 2.0])
        for temperature in (0.0, 1e-8, 9e-6):
            processing = Processing.of(SamplingParams(temperature=temperature, top_k=1, top_p=0.1))
            assert processing.is_greedy
            assert process_logits(logits, processing).tolist() == logits.tolist()
        assert not Processing(temperature=1e-4).is_greedy

    @EXACT
    @given(st.lists(st.floats(-30, 30), min_size=2, max_size=12), st.integers(0, 12), st.floats(1e-4, 1))
    def test_filters_keep_the_best_and_only_lower_ranked_tokens_go(
        self, logits: list[float], top_k: int, top_p: float
    ) -> None:
        tensor = torch.tensor(logits)
        scores = process_logits(tensor, Processing(temperature=0.8, top_k=top_k, top_p=top_p))
        kept = scores.isfinite()
        assert kept[tensor.argmax()]
        if not kept.all():
            assert tensor[kept].min() > tensor[~kept].max()
        assert torch.equal(scores[kept], tensor[kept] / 0.8)


@pytest.fixture
def largest_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Extreme:
        def random_raw(self, count: int) -> np.ndarray:
            bits = np.full(count, 2**64 - 1, dtype=np.uint64)
            bits[::2] = 0
            return bits

    monkeypatch.setattr(sampling, "philox", lambda *key: Extreme())
    return iter(())


class TestGumbelNoise:
    def test_a_token_keeps_its_number_whatever_the_size_and_the_order_of_asking(self) -> None:
        large, small = GumbelNoise(7, 1000), GumbelNoise(7, 10)
        forwards = [large.row(position).clone() for position in range(20)]
        backwards = [GumbelNoise(7, 1000).row(position) for position in reversed(range(20))]
        for position in range(20):
            assert torch.equal(small.row(position), forwards[position][:10])
            assert torch.equal(backwards[19 - position], forwards[position])
        assert torch.equal(large.rows([3, 1, 3]), torch.stack([forwards[3], forwards[1], forwards[3]]))

    def test_rows_that_were_dropped_come_back_the_same(self) -> None:
        noise = GumbelNoise(7, 16)
        first = noise.row(0).clone()
        for position in range(1, 300):
            noise.row(position)
        assert torch.equal(noise.row(0), first)

    def test_a_trimmed_head_sees_the_numbers_of_its_own_tokens(self) -> None:
        ids = torch.tensor([90, 3, 41])
        assert torch.equal(GumbelNoise(7, 91, token_ids=ids).row(5), GumbelNoise(7, 200).row(5)[ids])

    @pytest.mark.gpu
    def test_every_device_sees_the_same_numbers(self) -> None:
        row = GumbelNoise(7, 1000, "cuda").row(5)
        assert row.is_cuda
        assert torch.equal(row.cpu(), GumbelNoise(7, 1000).row(5))

    def test_seeds_and_positions_give_rows_of_their_own(self) -> None:
        rows = [GumbelNoise(seed, 64).row(position) for seed in (0, 1, 2**63 - 1) for position in (0, 1, 2**40)]
        assert len({tuple(row.tolist()) for row in rows}) == 9
        stacked = torch.stack([GumbelNoise(0, 20_000).row(position) for position in (0, 1)])
        # Correlation of 20,000 independent pairs: beyond 0.05 is more than 7 sigma, below 1e-11 by chance.
        assert abs(float(torch.corrcoef(stacked)[0, 1])) < 0.05

    def test_follows_the_gumbel_distribution(self) -> None:
        noise = torch.cat([GumbelNoise(seed, 50_000).row(9) for seed in range(4)]).double().sort().values
        expected = torch.exp(-torch.exp(-noise))
        empirical = torch.arange(1, len(noise) + 1) / len(noise)
        # Dvoretzky, Kiefer, Wolfowitz: the distance passes d by chance with probability 2 exp(-2 n d^2) = 1e-9.
        bound = math.sqrt(math.log(2e9) / (2 * len(noise)))
        assert float((expected - empirical).abs().max()) < bound + 1 / len(noise)

    def test_the_largest_sum_is_a_sample_of_the_distribution(self) -> None:
        p = torch.tensor([0.5, 0.25, 0.15, 0.1])
        noise = GumbelNoise(3, 4)
        counts = torch.zeros(4)
        for position in range(4000):
            counts[(p.log() + noise.row(position)).argmax()] += 1
        # Each share within 6.2 standard deviations: below 1e-9 by chance.
        assert ((counts / 4000 - p).abs() < 6.2 * (p * (1 - p) / 4000).sqrt()).all()

    @pytest.mark.usefixtures("largest_bits")
    def test_is_finite_for_the_most_extreme_bits(self) -> None:
        row = GumbelNoise(0, 8).row(0)
        assert row.isfinite().all()
        assert float(row.max()) > 30
        assert float(row.min()) < -3


class TestUniforms:
    def test_are_in_range_and_use_all_bits(self) -> None:
        values = uniforms(5, Stream.ACCEPT, 0, 10_000)
        assert values.dtype == np.float64
        assert 0 <= values.min() < 1e-2
        assert 0.99 < values.max() < 1
        assert np.all(values * 2.0**53 == np.floor(values * 2.0**53))
        assert np.any(values * 2.0**52 != np.floor(values * 2.0**52))

    @pytest.mark.usefixtures("largest_bits")
    def test_never_reach_one(self) -> None:
        assert uniforms(0, Stream.ACCEPT, 0, 2).tolist() == [0.0, 1 - 2.0**-53]

    def test_are_the_same_however_many_are_asked_for(self) -> None:
        many = uniforms(5, Stream.DRAFT, 8, 100, lane=3)
        assert np.array_equal(uniforms(5, Stream.DRAFT, 8, 7, lane=3), many[:7])

    def test_streams_positions_lanes_and_seeds_are_independent(self) -> None:
        keys = list(itertools.product((0, 1), Stream, (0, 1), (0, 1)))
        rows = np.stack([uniforms(seed, stream, position, 4000, lane) for seed, stream, position, lane in keys])
        correlations = np.corrcoef(rows) - np.eye(len(keys))
        # 496 pairs of 4,000 numbers: a correlation beyond 0.12 is 7.6 sigma, below 1e-10 by chance for all of them.
        assert np.abs(correlations).max() < 0.12
        assert np.abs(rows.mean(1) - 0.5).max() < 7.6 * math.sqrt(1 / 12 / 4000)


class TestSample:
    @EXACT
    @given(distributions(7), st.floats(0, 1, exclude_max=True))
    def test_inverts_the_cumulative_sum_and_never_draws_a_zero(self, weights: list[float], uniform: float) -> None:
        for draw in (uniform, 0.0, 1 - 2.0**-53, 2.0**-53):
            token = sample(torch.tensor([weights]), np.array([draw]))[0]
            assert weights[token] > 0
            cumulative = torch.tensor(weights).double().cumsum(0)
            target = draw * float(cumulative[-1])
            assert target <= float(cumulative[token])
            assert token == 0 or float(cumulative[token - 1]) <= target

    def test_rows_use_their_own_draws_and_need_no_normalising(self) -> None:
        weights = torch.tensor([[0.0, 2.0, 6.0, 0.0]] * 4 + [[5.0, 0.0, 0.0, 0.0]])
        assert sample(weights, np.array([0.0, 0.24, 0.26, 1 - 2.0**-53, 0.99])) == [1, 1, 2, 2, 0]

    @pytest.mark.parametrize("weight", [1e-300, 5e-324, 1e300, 1e-45])
    def test_the_smallest_and_largest_weights_work(self, weight: float) -> None:
        weights = torch.tensor([[0.0, weight, 0.0]], dtype=torch.float64)
        assert sample(weights.repeat(3, 1), np.array([0.0, 0.5, 1 - 2.0**-53])) == [1, 1, 1]

    @pytest.mark.parametrize("row", [[0.0, 0.0], [math.nan, 1.0]])
    def test_a_row_without_weight_is_refused(self, row: list[float]) -> None:
        with pytest.raises(ValueError, match="at least one positive weight"):
            sample(torch.tensor([[1.0, 1.0], row]), np.array([0.5, 0.5]))

    def test_equal_steps_of_the_uniform_give_the_distribution_exactly(self) -> None:
        weights = torch.tensor([0.25, 0.0, 0.5, 0.125, 0.125])
        grid = (np.arange(64) + 0.5) / 64
        tokens = sample(weights.repeat(64, 1), grid)
        assert [tokens.count(token) / 64 for token in range(5)] == weights.tolist()


class TestSaguaroWeights:
    @EXACT
    @given(distributions(6), st.integers(0, 7), st.sampled_from([0.0, 0.1, 0.5, 0.99, 1.0]))
    def test_definition_14(self, q: list[float], num_cached: int, c: float) -> None:
        tensor = torch.tensor(q, dtype=torch.float64)
        found = saguaro_weights(tensor, num_cached, c)
        # Ties at the edge of the cached set may fall either way: take the set that was reduced from torch's own order.
        cached = set(tensor.topk(min(num_cached, 6)).indices.tolist()) if num_cached else set()
        weights = [c * value if token in cached else value for token, value in enumerate(q)]
        expected = [weight / sum(weights) for weight in weights] if sum(weights) else q
        assert found.tolist() == pytest.approx(expected, abs=1e-12)
        assert float(found.sum()) == pytest.approx(1.0)
        assert all(value == 0 for value, before in zip(found.tolist(), q, strict=True) if before == 0)

    def test_by_hand(self) -> None:
        q = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
        assert torch.allclose(saguaro_weights(q, 2, 0.5)[0], torch.tensor([4, 3, 4, 2]).double() / 13)
        assert torch.allclose(saguaro_weights(q, 2, 0.5)[1], torch.tensor([2, 4, 3, 4]).double() / 13)
        assert torch.allclose(saguaro_weights(q, 1, 0.0)[0], torch.tensor([0, 3, 2, 1]).double() / 6)

    def test_c_of_one_and_an_empty_cache_change_nothing(self) -> None:
        q = torch.tensor([[0.6, 0.4]])
        assert torch.equal(saguaro_weights(q, 1, 1.0), q)
        assert torch.equal(saguaro_weights(q, 0, 0.2), q)

    def test_c_of_zero_keeps_something_to_draw(self) -> None:
        for q in ([1.0, 0.0, 0.0], [0.5, 0.3, 0.2]):
            weights = saguaro_weights(torch.tensor([q]), 3, 0.0)
            assert weights.tolist() == [pytest.approx(q)]
        assert saguaro_weights(torch.tensor([[0.5, 0.3, 0.2]]), 2, 0.0).tolist() == [[0.0, 0.0, 1.0]]
