"""The two lossless rules: which tokens stand, what t* is, and that the output follows p exactly."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import EXACT, distributions
from torch import Tensor

from saguaro_core.config import SamplingParams
from saguaro_core.decoding.sources import Proposal
from saguaro_core.decoding.target import Verifier
from saguaro_core.sampling import saguaro_weights
from saguaro_core.verification import DraftDistributions, Outcome, verify_coupled, verify_rejection

ALMOST_ONE = 1 - 2.0**-53


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TestRejection:
    def test_a_uniform_of_zero_does_not_accept_what_p_excludes(self) -> None:
        p, q = rows([0.0, 1.0], [1.0, 0.0]), rows([0.5, 0.5])
        assert verify_rejection(p, q, [0], [0.0], [0.5, 0.5]) == Outcome(0, 1)
        assert verify_rejection(p, None, [0], [0.0], [0.5, 0.5]) == Outcome(0, 1)

    def test_the_test_is_strict_at_the_boundary(self) -> None:
        p, q = rows([0.25, 0.75], [1.0, 0.0]), rows([0.5, 0.5])
        assert verify_rejection(p, q, [0], [0.5], [0.5, 0.5]).accepted == 0
        assert verify_rejection(p, q, [0], [float(np.nextafter(0.5, 0))], [0.5, 0.5]).accepted == 1

    @pytest.mark.parametrize("uniform", [0.0, 0.5, ALMOST_ONE])
    def test_equal_distributions_always_accept(self, uniform: float) -> None:
        p = rows([0.2, 0.3, 0.5], [0.0, 1.0, 0.0], [1 / 3] * 3, [0.5, 0.5, 0.0])
        for drafted in ([0, 1, 2], [2, 1, 0]):
            assert verify_rejection(p, p[:3], drafted, [uniform] * 3, [uniform] * 4) == Outcome(
                3, 0 if uniform < 0.5 else 1
            )

    def test_an_empty_residual_falls_back_to_p(self) -> None:
        # q exceeds p on the drafted token by one rounding step only, and nowhere else is p larger.
        p = rows([0.5, 0.5], [1.0, 0.0])
        q = rows([float(np.nextafter(0.5, 1)), 0.5])
        assert verify_rejection(p, q, [0], [ALMOST_ONE], [0.75, 0.5]) == Outcome(0, 1)
        one_hot = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
        more = torch.tensor([[float(np.nextafter(np.float32(1), np.float32(2))), 0.0, 0.0]])
        assert verify_rejection(one_hot, more, [0], [ALMOST_ONE], [0.9, 0.5]) == Outcome(0, 0)

    def test_a_point_mass_is_accepted_as_often_as_p_says(self) -> None:
        p = rows([0.2, 0.3, 0.5], [1.0, 0.0, 0.0])
        assert verify_rejection(p, None, [1], [0.29], [0.0, 0.0]) == Outcome(1, 0)
        assert verify_rejection(p, None, [1], [0.31], [0.0, 0.0]) == Outcome(0, 0)
        # The residual is p without the proposed token: 2 to 5 between the others.
        assert verify_rejection(p, None, [1], [0.31], [2 / 7 - 1e-9, 0.0]).bonus_token_id == 0
        assert verify_rejection(p, None, [1], [0.31], [2 / 7 + 1e-9, 0.0]).bonus_token_id == 2

    def test_each_position_uses_its_own_row_and_uniforms(self) -> None:
        p = rows([0.9, 0.1], [0.9, 0.1], [0.1, 0.9])
        q = rows([0.1, 0.9], [0.5, 0.5])
        assert verify_rejection(p, q, [0, 1], [0.99, 0.19], [0.0, 0.0, 0.05]) == Outcome(2, 0)
        assert verify_rejection(p, q, [0, 1], [0.99, 0.21], [0.0, 0.5, 0.9]) == Outcome(1, 0)

    @EXACT
    @given(distributions(4), distributions(4))
    def test_acceptance_and_residual_are_the_papers(self, p: list[float], q: list[float]) -> None:
        """Found by bisection of the uniforms, so exact: P(emit x) = q min(1, p/q) + P(reject) residual(x) = p(x)."""
        emitted = np.zeros(4)
        for token in range(4):
            if q[token] == 0:
                continue
            accept = acceptance_share(p, q, token)
            emitted[token] += q[token] * accept
            if accept < 1:
                emitted += q[token] * (1 - accept) * residual_shares(p, q, token)
        assert emitted == pytest.approx(np.array(p), abs=1e-9)

    @EXACT
    @given(distributions(4), st.integers(0, 3))
    def test_a_deterministic_proposal_gives_exactly_p(self, p: list[float], token: int) -> None:
        accept = acceptance_share(p, None, token)
        emitted = np.zeros(4)
        emitted[token] = accept
        if accept < 1:
            emitted += (1 - accept) * residual_shares(p, None, token)
        assert emitted == pytest.approx(np.array(p), abs=1e-9)

    @EXACT
    @given(distributions(5), distributions(5), st.sampled_from([0.0, 0.2, 0.7]), st.integers(1, 4))
    def test_saguaros_weights_stay_lossless(self, p: list[float], q: list[float], c: float, num_cached: int) -> None:
        weighted = saguaro_weights(rows(q), num_cached, c)[0]
        emitted = np.zeros(5)
        for token, mass in enumerate(weighted.tolist()):
            if mass == 0:
                continue
            accept = acceptance_share(p, weighted.tolist(), token)
            emitted[token] += mass * accept
            if accept < 1:
                emitted += mass * (1 - accept) * residual_shares(p, weighted.tolist(), token)
        assert emitted == pytest.approx(np.array(p), abs=1e-9)

    @EXACT
    @given(st.data())
    def test_invariants(self, data: st.DataObject) -> None:
        k = data.draw(st.integers(0, 5))
        p = rows(*data.draw(st.lists(distributions(5), min_size=k + 1, max_size=k + 1)))
        q_rows = data.draw(st.lists(distributions(5), min_size=k, max_size=k))
        q = rows(*q_rows) if k and data.draw(st.booleans()) else None
        drafted = [
            data.draw(st.sampled_from([token for token in range(5) if q is None or q_rows[i][token] > 0]))
            for i in range(k)
        ]
        draw = st.floats(0, 1, exclude_max=True)
        accept = data.draw(st.lists(draw, min_size=k, max_size=k))
        bonus = data.draw(st.lists(draw, min_size=k + 1, max_size=k + 1))
        outcome = verify_rejection(p, q, drafted, accept, bonus)
        assert 0 <= outcome.accepted <= k
        emitted = [*drafted[: outcome.accepted], outcome.bonus_token_id]
        assert all(p[i, token] > 0 for i, token in enumerate(emitted))
        if outcome.accepted < k:
            at = outcome.accepted
            rejected = drafted[at]
            assert float(p[at, rejected]) < (1.0 if q is None else float(q[at, rejected]))
            assert outcome.bonus_token_id != rejected
        # What comes after the first rejection has no say.
        changed = verify_rejection(p, q, drafted, accept[: outcome.accepted + 1] + [0.0] * k, bonus)
        assert changed.accepted == outcome.accepted or outcome.accepted == k


def boundary(is_accepted: Callable[[float], bool]) -> float:
    """The share of the uniforms that accept (they are those below a bound), by bisection."""
    low, high = 0.0, 1.0
    if is_accepted(ALMOST_ONE):
        return 1.0
    for _ in range(34):
        middle = (low + high) / 2
        low, high = (middle, high) if is_accepted(middle) else (low, middle)
    return low


def verify_one(p: list[float], q: list[float] | None, token: int, accept: float, bonus: float) -> Outcome:
    return verify_rejection(rows(p, p), None if q is None else rows(q), [token], [accept], [bonus, 0.5])


def acceptance_share(p: list[float], q: list[float] | None, token: int) -> float:
    """How often a drafted token stands."""
    return boundary(lambda u: verify_one(p, q, token, u, 0.5).accepted == 1)


def residual_shares(p: list[float], q: list[float] | None, token: int) -> np.ndarray:
    """How often each token is drawn after `token` was rejected."""

    def share_up_to(last: int) -> float:
        return boundary(lambda v: verify_one(p, q, token, ALMOST_ONE, v).bonus_token_id <= last)

    return np.diff([0.0, *map(share_up_to, range(len(p)))])


class TestCoupled:
    def test_greedy_takes_the_argmax_not_the_ratio(self) -> None:
        """Ratios would accept token a here: p(a)/q(a) = 0.30/0.20 > 1. The argmax of p is b."""
        a, b = 0, 1
        p = torch.tensor([[0.30, 0.50, 0.20], [0.30, 0.50, 0.20]])
        q = DraftDistributions(torch.tensor([[0.20, 0.15, 0.65]]))
        for rule in ("shared_noise", "rejection"):
            for seed in range(1000):
                verifier = Verifier(SamplingParams(temperature=0.0, seed=seed), rule, 3)
                outcome = verifier.decide(p.log(), Proposal(token_ids=[a], distributions=q), seed)
                assert outcome == Outcome(0, b)

    def test_stops_at_the_first_difference(self) -> None:
        scores = torch.eye(6)[[1, 2, 3, 4, 5]]
        assert verify_coupled(scores, None, [1, 2, 3, 4]) == Outcome(4, 5)
        # A match pattern of 1, 0, 1, 1 counts one accepted token of four.
        assert verify_coupled(scores, None, [1, 0, 3, 4]) == Outcome(1, 2)
        assert verify_coupled(scores, None, [0, 2, 3, 4]) == Outcome(0, 1)
        assert verify_coupled(scores[:1], None, []) == Outcome(0, 1)

    def test_noise_shifts_the_choice(self) -> None:
        scores, noise = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.0]])
        assert verify_coupled(scores, noise, [0]) == Outcome(1, 1)
        assert verify_coupled(scores, noise, [1]) == Outcome(0, 0)

    @EXACT
    @given(st.data())
    def test_the_text_does_not_depend_on_the_draft(self, data: st.DataObject) -> None:
        k = data.draw(st.integers(1, 5))
        scores = torch.tensor(data.draw(st.lists(st.permutations(range(5)), min_size=k + 1, max_size=k + 1))).float()
        own = scores.argmax(-1).tolist()
        drafted = data.draw(st.lists(st.integers(0, 4), min_size=k, max_size=k))
        outcome = verify_coupled(scores, None, drafted)
        emitted = [*drafted[: outcome.accepted], outcome.bonus_token_id]
        assert emitted == own[: len(emitted)]
        if outcome.accepted < k:
            assert drafted[outcome.accepted] != own[outcome.accepted]


class TestVerifier:
    LOGITS = torch.tensor([[1.0, 0.5, 0.0, -1.0]] * 4)

    def decide(self, seed: int, position: int, rule: str = "rejection", drafted: list[int] | None = None) -> Outcome:
        verifier = Verifier(SamplingParams(temperature=1.0, seed=seed), rule, 4)  # type: ignore[arg-type]
        token_ids = [0, 1, 2] if drafted is None else drafted
        q = DraftDistributions(torch.full((len(token_ids), 4), 0.25)) if rule == "rejection" else None
        return verifier.decide(
            self.LOGITS[: len(token_ids) + 1], Proposal(token_ids=token_ids, distributions=q), position
        )

    @pytest.mark.parametrize("rule", ["rejection", "shared_noise"])
    def test_is_keyed_by_seed_and_position_alone(self, rule: str) -> None:
        first = [self.decide(seed, position, rule) for seed in range(10) for position in range(10)]
        again = [self.decide(seed, position, rule) for seed in range(10) for position in range(10)]
        assert first == again
        assert len(set(first)) > 4

    def test_shared_noise_gives_the_same_token_however_many_are_drafted(self) -> None:
        for seed in range(50):
            single = [self.decide(seed, position, "shared_noise", []).bonus_token_id for position in (7, 8, 9, 10)]
            drafted = single[:3]
            assert self.decide(seed, 7, "shared_noise", drafted) == Outcome(3, single[3])
            assert self.decide(seed, 7, "shared_noise", [drafted[0], (drafted[1] + 1) % 4, 0]) == Outcome(1, single[1])

    def test_probabilities_shown_are_before_the_filters(self) -> None:
        for temperature, divided_by in ((2.0, 2.0), (0.0, 1.0)):
            verifier = Verifier(SamplingParams(temperature=temperature, top_k=1), "rejection", 4)
            expected = (self.LOGITS / divided_by).softmax(-1)
            shown, likeliest = verifier.shown(self.LOGITS, [1] * len(self.LOGITS), 3)
            assert shown == pytest.approx(expected[:, 1].tolist(), rel=1e-5)
            for row, best in enumerate(likeliest):
                assert [i for i, _ in best] == self.LOGITS[row].topk(3).indices.tolist()
                assert [p for _, p in best] == pytest.approx(expected[row].topk(3).values.tolist(), rel=1e-5)
            assert verifier.shown(self.LOGITS, [1] * len(self.LOGITS), 0) == (shown, [[]] * len(self.LOGITS))


class TestDraftDistributions:
    Q = torch.tensor([[0.25, 0.75], [1.0, 0.0]])

    def test_a_trimmed_head_spreads_over_its_own_tokens(self) -> None:
        dense = DraftDistributions(self.Q, torch.tensor([4, 1])).over_vocabulary(6, torch.device("cpu"))
        assert dense.tolist() == [[0, 0.75, 0, 0, 0.25, 0], [0, 0, 0, 0, 1, 0]]

    @pytest.mark.parametrize(("size", "expected"), [(2, [0.25, 0.75]), (4, [0.25, 0.75, 0, 0])])
    def test_a_shorter_head_is_padded(self, size: int, expected: list[float]) -> None:
        assert DraftDistributions(self.Q).over_vocabulary(size, torch.device("cpu"))[0].tolist() == expected

    @EXACT
    @given(distributions(5), distributions(3), st.permutations(range(5)))
    def test_a_trimmed_head_stays_lossless(self, p: list[float], q: list[float], order: list[int]) -> None:
        token_ids = torch.tensor(order[:3])
        dense = DraftDistributions(rows(q), token_ids).over_vocabulary(5, torch.device("cpu"))[0].tolist()
        assume(sum(dense) > 0)
        emitted = np.zeros(5)
        for token, mass in enumerate(dense):
            if mass == 0:
                continue
            accept = acceptance_share(p, dense, token)
            emitted[token] += mass * accept
            if accept < 1:
                emitted += mass * (1 - accept) * residual_shares(p, dense, token)
        assert emitted == pytest.approx(np.array(p), abs=1e-9)
