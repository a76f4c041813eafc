"""The draft's side by hand: what it answers to each outcome, what its cache holds then, and what it learns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from random_models import make_model, make_runner, tokens
from scripted import ScriptedRunner, hashed

from saguaro_core.config import Mode, SamplingParams, SpeculationConfig
from saguaro_core.draft.lessons import RANKS_KEPT
from saguaro_core.draft.messages import Begin, Speculation
from saguaro_core.draft.proposer import Proposer
from saguaro_core.draft.speculator import Speculator
from saguaro_core.models.runner import Runner, trunk_batch
from saguaro_core.sampling import GumbelNoise
from saguaro_core.verification import Outcome

V = 24
PROMPT = (3, 1, 4, 1, 5)
K = 4


def begin(
    prompt: Sequence[int] = PROMPT,
    *,
    mode: Mode = "ssd",
    sampling: SamplingParams | None = None,
    eos: tuple[int, ...] = (),
    **speculation: Any,
) -> Begin:
    config = SpeculationConfig(
        **{"lookahead": K, "budget": 15, "fan_out": "uniform", "fallback": "neural", "copying": "off", **speculation}
    )
    return Begin(
        epoch=7,
        mode=mode,
        prompt_token_ids=tuple(prompt),
        sampling=sampling or SamplingParams(),
        speculation=config,
        eos_token_ids=eos,
        lookahead=config.lookahead,
        prefill_chunk=3,
    )


def scripted(**options: Any) -> Speculator:
    return Speculator(ScriptedRunner(hashed(V, 2.0, salt=1), V, **options))


def build(speculator: Speculator, passes: int = 100) -> None:
    for _ in range(passes):
        if not speculator.build_step():
            return


def trunk_slots(speculator: Speculator) -> list[tuple[int, int]]:
    runner = speculator.runner
    assert isinstance(runner, ScriptedRunner)
    return [runner.slots[0, slot] for slot in range(speculator.cached)]


def check_trunk(speculator: Speculator, is_built: bool) -> None:
    trunk = speculator.context + speculator.drafted.token_ids
    assert speculator.cached == len(trunk) - (not is_built)
    assert trunk_slots(speculator) == list(enumerate(trunk[: speculator.cached]))


def prepared(speculator: Speculator, accepted: int) -> list[int]:
    return [o.bonus_token_id for o in speculator.branches.cache.outcomes if o.accepted == accepted]


class TestCache:
    @pytest.mark.parametrize("accepted", range(K + 1))
    @pytest.mark.parametrize("is_hit", [True, False])
    def test_after_every_outcome_the_trunk_is_whole(self, accepted: int, is_hit: bool) -> None:
        speculator = scripted()
        first = speculator.begin(begin())
        assert (first.cache, first.fallback, len(first.token_ids), first.epoch) == ("compulsory", "neural", K, 7)
        check_trunk(speculator, is_built=False)
        build(speculator)
        check_trunk(speculator, is_built=True)
        for number in range(1, 6):
            ready = prepared(speculator, accepted)
            others = set(range(V)) - set(ready) - set(speculator.drafted.token_ids)
            bonus = ready[-1] if is_hit else min(others)
            before = [*speculator.context, *speculator.drafted.token_ids[:accepted], bonus]
            answer = speculator.verified(number, Outcome(accepted, bonus), K)
            assert answer.cache == ("hit" if is_hit else "miss")
            assert answer.round_index == number
            assert speculator.context == before
            check_trunk(speculator, is_built=False)
            assert list(answer.token_ids) == greedy(before, K)
            build(speculator)
            check_trunk(speculator, is_built=True)

    @pytest.mark.parametrize("passes", range(K + 3))
    def test_an_early_outcome_is_answered_with_what_is_ready(self, passes: int) -> None:
        speculator = scripted()
        speculator.begin(begin(deepening="all"))
        build(speculator, passes)
        # The first step reads the speculation itself; each further one gives every branch a token.
        ready = max(0, min(passes - 1, K))
        bonus = prepared(speculator, 2)[0] if passes else 0
        answer = speculator.verified(1, Outcome(2, bonus), K)
        assert answer.cache == ("hit" if ready else "miss")
        assert len(answer.token_ids) == (ready or K)
        assert list(answer.token_ids) == greedy(speculator.context, len(answer.token_ids))
        check_trunk(speculator, is_built=False)
        build(speculator)
        check_trunk(speculator, is_built=True)

    @pytest.mark.parametrize("lookahead", [0, 1, 3])
    @pytest.mark.parametrize("is_hit", [True, False])
    def test_never_more_than_asked_for(self, lookahead: int, is_hit: bool) -> None:
        speculator = scripted()
        speculator.begin(begin())
        build(speculator)
        bonus = prepared(speculator, 1)[0] if is_hit else next(t for t in range(V) if t not in prepared(speculator, 1))
        assert len(speculator.verified(1, Outcome(1, bonus), lookahead).token_ids) == lookahead
        build(speculator)
        check_trunk(speculator, is_built=True)

    def test_sd_builds_nothing_and_reports_steps(self) -> None:
        speculator = scripted()
        first = speculator.begin(begin(mode="sd"))
        assert (first.cache, first.fallback, first.fan_out, first.prepared) == (None, None, (), ())
        assert not speculator.build_step()
        second = speculator.verified(1, Outcome(K, 9), K)
        check_trunk(speculator, is_built=False)
        assert [span.kind for span in second.spans] == ["step"] * K
        assert list(second.token_ids) == greedy(speculator.context, K)

    def test_a_new_request_sees_nothing_of_the_old_one(self) -> None:
        speculator = scripted()
        speculator.begin(begin())
        build(speculator, 3)
        again = speculator.begin(begin((9, 9, 2)))
        assert list(again.token_ids) == greedy([9, 9, 2], K)
        assert again.prepared == ()
        speculator.end()
        assert not speculator.is_building
        assert not speculator.build_step()


def greedy(context: Sequence[int], count: int) -> list[int]:
    table, text = hashed(V, 2.0, salt=1), list(context)
    for _ in range(count):
        scores = list(table(tuple(text)))
        text.append(scores.index(max(scores)))
    return text[len(context) :]


class TestPreparedOutcomes:
    @pytest.mark.parametrize(
        "speculation", [{}, {"fan_out": "geometric"}, {"fan_out": "list", "fan_out_list": (3, 0, 2, 1, 5)}]
    )
    def test_what_is_reported_is_what_was_prepared(self, speculation: dict[str, Any]) -> None:
        speculator = scripted()
        speculator.begin(begin(**speculation))
        build(speculator)
        outcomes = list(speculator.branches.cache.outcomes)
        assert len(outcomes) == len(set(outcomes))
        answer = speculator.verified(1, outcomes[0], K)
        reported = [Outcome(k, token) for k, ids in answer.prepared for token in ids]
        assert reported == outcomes
        assert len(answer.fan_out) == K + 1
        counts = dict.fromkeys(range(K + 1), 0) | {k: len(ids) for k, ids in answer.prepared}
        assert tuple(counts.values()) == answer.fan_out
        assert sum(answer.fan_out) == (11 if speculation.get("fan_out") == "list" else 15)

    def test_are_the_best_of_the_ranking_without_the_drafted_token_and_without_ends(self) -> None:
        eos = (greedy(PROMPT, 2)[-1], 0, 1)
        table = hashed(V, 2.0, salt=1)
        speculator = scripted()
        first = speculator.begin(begin(eos=eos))
        build(speculator)
        for k in range(len(first.token_ids) + 1):
            scores = list(table((*PROMPT, *first.token_ids[:k])))
            ranking = sorted(range(V), key=lambda token: -scores[token])
            excluded = {*eos, *first.token_ids[k : k + 1]}
            wanted = [token for token in ranking if token not in excluded]
            found = prepared(speculator, k)
            assert found == wanted[: len(found)]
            assert len(found) == speculator.branches.fan_out[k]

    def test_a_block_ends_with_an_end_of_turn(self) -> None:
        text = greedy(PROMPT, K)
        speculator = scripted()
        assert speculator.begin(begin(eos=(text[1],))).token_ids == tuple(text[: text.index(text[1]) + 1])
        build(speculator)
        # The same inside a prepared branch.
        hits = 0
        for bonus in prepared(scripted_built(), 0):
            tail = greedy([*PROMPT, bonus], K)
            fresh = scripted()
            fresh.begin(begin(eos=(tail[2],)))
            build(fresh)
            if bonus in prepared(fresh, 0):
                hits += 1
                answer = fresh.verified(1, Outcome(0, bonus), K)
                assert list(answer.token_ids) == tail[: tail.index(tail[2]) + 1]
                check_trunk(fresh, is_built=False)
        assert hits

    def test_a_vocabulary_smaller_than_the_budget_is_no_problem(self) -> None:
        speculator = Speculator(ScriptedRunner(hashed(5, 2.0, salt=1), 5))
        speculator.begin(begin((3, 1), budget=64))
        build(speculator)
        assert all(len(prepared(speculator, k)) == 4 for k in range(K))
        assert len(prepared(speculator, K)) == 5

    def test_under_shared_noise_candidates_follow_the_shifted_ranking(self) -> None:
        sampling = SamplingParams(temperature=1.0, seed=11)
        speculator = scripted()
        first = speculator.begin(begin(sampling=sampling, budget=20))
        build(speculator)
        noise, table = GumbelNoise(11, V), hashed(V, 2.0, salt=1)
        for k in range(K + 1):
            shifted = torch.tensor(table((*PROMPT, *first.token_ids[:k]))) + noise.row(len(PROMPT) + k)
            ranking = shifted.argsort(descending=True).tolist()
            if k < K:
                assert ranking[0] == first.token_ids[k]
            expected = ranking[1:] if k < K else ranking
            assert prepared(speculator, k) == expected[: speculator.branches.fan_out[k]]

    def test_under_rejection_sampling_each_token_comes_with_the_distribution_it_was_drawn_from(self) -> None:
        sampling = SamplingParams(temperature=0.8, top_k=6, seed=11)
        speculator = scripted()
        answers = [speculator.begin(begin(sampling=sampling, rule="rejection", saguaro_c=0.5))]
        for number in range(1, 6):
            build(speculator)
            outcome = speculator.branches.cache.outcomes[number]
            answers.append(speculator.verified(number, outcome, K))
        assert [answer.cache for answer in answers] == ["compulsory"] + ["hit"] * 5
        for answer in answers:
            q = np.frombuffer(answer.distributions, dtype=np.float32).reshape(-1, V)
            assert len(q) == len(answer.token_ids) == len(answer.q) == K
            assert q.sum(1) == pytest.approx(np.ones(K), abs=1e-5)
            assert all((row > 0).sum() == 6 and row[token] > 0 for row, token in zip(q, answer.token_ids, strict=True))


def scripted_built() -> Speculator:
    speculator = scripted()
    speculator.begin(begin())
    build(speculator)
    return speculator


class TestContextLimit:
    @pytest.mark.parametrize("room", range(1, 13))
    @pytest.mark.parametrize("fallback", ["neural", "fast"])
    def test_nothing_beyond_the_drafts_context_is_ever_fed(self, room: int, fallback: str) -> None:
        """ScriptedRunner asserts it; here every way to reach the limit is walked."""
        for accepted in range(K + 1):
            speculator = scripted(context_length=len(PROMPT) + room)
            answer = speculator.begin(begin(fallback=fallback))
            number = 0
            while not answer.exhausted:
                assert len(answer.token_ids) <= len(PROMPT) + room - len(speculator.context)
                build(speculator)
                number += 1
                k = min(accepted, len(answer.token_ids))
                bonus = next(iter(prepared(speculator, k)), 0)
                answer = speculator.verified(number, Outcome(k, bonus), K)
            assert len(speculator.context) >= len(PROMPT) + room
            assert answer.token_ids == ()
            assert not speculator.is_building
            assert speculator.verified(number + 1, Outcome(0, 2), K).exhausted

    @pytest.mark.parametrize("length", [1, 4, 5, 6])
    def test_a_prompt_as_long_as_the_context_or_longer(self, length: int) -> None:
        speculator = scripted(context_length=5)
        answer = speculator.begin(begin([2] * length))
        assert answer.exhausted == (length >= 5)
        assert len(answer.token_ids) == max(0, min(K, 5 - length))


class TestTransformer:
    """With a real cache: after a hit the moved rows are those that a fresh prefill of the same ids would make."""

    @pytest.mark.parametrize("accepted", range(K + 1))
    def test_moved_rows_equal_recomputed_ones(self, accepted: int) -> None:
        speculator = Speculator(make_runner(make_model()))
        fresh = make_runner(make_model())
        speculator.begin(begin(tokens(9)))
        for number in range(1, 8):
            build(speculator)
            ready = prepared(speculator, accepted)
            outcome = Outcome(accepted, ready[number % len(ready)])
            answer = speculator.verified(number, outcome, K)
            assert answer.cache == "hit"
            text = speculator.context + list(answer.token_ids)
            self.check_rows(speculator, fresh, text)
            expected = greedy_of(fresh, speculator.context, K)
            assert list(answer.token_ids) == expected

    def check_rows(self, speculator: Speculator, fresh: Runner, text: list[int]) -> None:
        """Logits after the next token, read over the speculator's own cache, against those of a fresh prefill."""
        first = speculator.cached
        pending = text[first:]
        over_moved = speculator.runner.forward(trunk_batch(pending, first, len(pending)))
        anew = fresh.forward(trunk_batch(text, 0, len(pending)))
        assert over_moved is not None
        assert anew is not None
        assert float((over_moved - anew).abs().max()) < 1e-4


def greedy_of(runner: Runner, context: list[int], count: int) -> list[int]:
    text = list(context)
    for _ in range(count):
        logits = runner.forward(trunk_batch(text, 0, 1))
        assert logits is not None
        text.append(int(logits[0, -1].argmax()))
    return text[len(context) :]


class TestLearning:
    def test_rounds_are_counted_for_the_state_that_made_them(self) -> None:
        speculator = scripted()
        speculator.begin(begin())
        build(speculator)
        prior = speculator.planner.estimates["hit"].accepted
        speculator.verified(1, speculator.branches.cache.outcomes[0], K)
        build(speculator)
        estimates = speculator.planner.estimates
        assert (estimates["miss"].rejected, estimates["miss"].num_ranked) == (5.0, 5.0)
        assert estimates["hit"].accepted == prior
        speculator.verified(2, Outcome(K, prepared(speculator, K)[0]), K)
        build(speculator)
        assert estimates["hit"].accepted == prior + K

    def test_ranks_do_not_count_the_drafted_token(self) -> None:
        proposer = Proposer(
            SamplingParams(), SpeculationConfig(), num_columns=5, token_ids=torch.tensor([9, 8, 7, 6, 5])
        )
        scores = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
        assert [proposer.rank(scores, token, None) for token in (9, 8, 5, 4)] == [1, 2, 5, None]
        assert [proposer.rank(scores, token, 9) for token in (8, 5)] == [1, 4]
        assert proposer.rank(scores, 8, 5) == 2
        assert proposer.candidates(scores, 3, {9, 7}) == [8, 6, 5]
        assert proposer.candidates(scores, 0, set()) == []
        assert RANKS_KEPT >= 16

    def test_spans_come_once(self) -> None:
        speculator = scripted()
        first: Speculation = speculator.begin(begin())
        assert [span.kind for span in first.spans] == ["prefill", "fallback"]
        build(speculator)
        second = speculator.verified(1, speculator.branches.cache.outcomes[0], K)
        assert [span.kind for span in second.spans] == ["build"]
        build(speculator, 2)
        assert [span.kind for span in speculator.end()] == ["build"]
        assert speculator.end() == ()


def test_a_filtered_token_ranks_after_every_kept_one() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    for rule in ("shared_noise", "rejection"):
        proposer = Proposer(
            SamplingParams(temperature=1.0, top_k=2, seed=1),
            SpeculationConfig(rule=rule),
            num_columns=4,
            token_ids=None,
        )
        for position in range(50):
            order = proposer.rank_scores(logits, [position])[0].argsort(descending=True).tolist()
            assert set(order[:2]) == {0, 1}
