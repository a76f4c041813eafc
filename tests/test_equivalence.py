"""AR, SD and SSD say the same: greedy for every setting and draft, sampled under shared noise; and what is counted."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
from local_engine import LocalEngine, LocalRun
from scripted import ScriptedRunner, Table, hashed, mixed
from served_draft import ServedEngine

from saguaro_core.config import (
    CopyingPolicy,
    DeepeningPolicy,
    FallbackPolicy,
    Mode,
    SamplingParams,
    ServicePolicy,
    SpeculationConfig,
)
from saguaro_core.draft.speculator import Speculator
from saguaro_core.events import Notice

V = 24
TARGET = hashed(V, 2.0, salt=1)
UNRELATED = hashed(V, 2.0, salt=2)
DRAFTS = {"unrelated": UNRELATED, "same": TARGET, "partly agreeing": mixed(TARGET, UNRELATED, 0.35)}
PARTLY = DRAFTS["partly agreeing"]
PROMPT = [3, 1, 4, 1, 5]
# Columns of a trimmed head, in no order.
KEPT = [17, 3, 9, 0, 21, 12, 5, 8, 2, 14]
MODES: tuple[Mode, ...] = ("ar", "sd", "ssd")
SPECULATIVE: tuple[Mode, ...] = ("sd", "ssd")
PATHS: tuple[tuple[Mode, int, FallbackPolicy], ...] = (
    ("sd", 4, "neural"),
    ("ssd", 1, "neural"),
    ("ssd", 4, "neural"),
    ("ssd", 4, "fast"),
)


def trimmed(table: Table) -> Table:
    return lambda history: [table(history)[token] for token in KEPT]


def engine(draft: Table = PARTLY, **options: Any) -> ServedEngine:
    return ServedEngine(ScriptedRunner(TARGET, V), ScriptedRunner(draft, V), **options)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count)


def shapes(lookahead: int) -> list[dict[str, Any]]:
    listed = tuple(range(lookahead, -1, -1))
    return [
        *(
            {"fan_out": policy, "budget": budget}
            for policy in ("confident", "geometric", "uniform")
            for budget in (1, 5, 64)
        ),
        {"fan_out": "list", "fan_out_list": listed},
    ]


class TestGreedy:
    @pytest.mark.parametrize("draft", list(DRAFTS))
    @pytest.mark.parametrize("lookahead", [1, 4, 8])
    def test_every_setting_gives_ars_tokens(self, draft: str, lookahead: int) -> None:
        plain = engine().run("ar", PROMPT, greedy(48)).ids
        policies = itertools.cycle(itertools.product(get_args(FallbackPolicy), get_args(CopyingPolicy)))
        runs = [
            engine(DRAFTS[draft]).run("sd", PROMPT, greedy(48), SpeculationConfig(lookahead=lookahead, copying=copying))
            for copying in get_args(CopyingPolicy)
        ]
        for shape, (fallback, copying) in zip(shapes(lookahead), policies, strict=False):
            config = SpeculationConfig(lookahead=lookahead, fallback=fallback, copying=copying, **shape)
            runs.append(engine(DRAFTS[draft]).run("ssd", PROMPT, greedy(48), config))
        for run in runs:
            assert run.ids == plain
            assert len(run.rounds) >= 3
        assert any(event.accepted for run in runs for event in run.rounds)
        # What lookup proposes and what is copied is nobody's model.
        own = [run for run in runs if run.loop.run_context.request.speculation.copying == "off"]
        drafted = [event for run in own for event in run.rounds if event.fallback != "ngram"]
        assert all(event.accepted == event.drafted for event in drafted) == (draft == "same")

    @pytest.mark.parametrize("draft", list(DRAFTS))
    @pytest.mark.parametrize("mode", SPECULATIVE)
    @pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
    def test_a_trimmed_draft_head(self, draft: str, mode: Mode, rule: str) -> None:
        subject = ServedEngine(
            ScriptedRunner(TARGET, V), ScriptedRunner(trimmed(DRAFTS[draft]), len(KEPT)), draft_token_ids=KEPT
        )
        plain = engine().run("ar", PROMPT, greedy(60)).ids
        run = subject.run(mode, PROMPT, greedy(60), SpeculationConfig(rule=rule))  # type: ignore[arg-type]
        assert run.ids == plain
        figures = run.finished.figures
        assert figures.num_accepted_draft_tokens < figures.num_draft_tokens
        assert draft == "unrelated" or figures.num_accepted_draft_tokens > 0

    @pytest.mark.parametrize("draft", list(DRAFTS))
    def test_outcomes_that_come_before_the_cache_is_complete(self, draft: str) -> None:
        plain = engine().run("ar", PROMPT, greedy(60)).ids
        lengths: set[int] = set()
        fallbacks: tuple[FallbackPolicy, ...] = ("neural", "fast")
        for fallback in fallbacks:
            by_times = SpeculationConfig(lookahead=4, fallback=fallback)
            assert self.run_early(DRAFTS[draft], by_times).ids == plain
            # Which lengths are worth their time differs from run to run.
            run = self.run_early(DRAFTS[draft], replace(by_times, service="ready", copying="off"))
            assert run.ids == plain
            lengths |= {event.drafted for event in run.rounds[:-2] if event.cache == "hit"}
        assert lengths >= {1, 2, 3} or draft != "same"

    def run_early(self, draft: Table, config: SpeculationConfig) -> LocalRun:
        """The verdict comes after 0 to 5 passes of a cache's build."""
        passes = (2, 4, 3, 1, 5, 0, 3)
        subject = LocalEngine(
            ScriptedRunner(TARGET, V), ScriptedRunner(draft, V), passes=lambda number: passes[number % len(passes)]
        )
        return subject.run("ssd", PROMPT, greedy(60), config)


class TestMisses:
    """A draft that never agrees misses every round; each backup must still give AR's tokens, one a round at least."""

    @pytest.mark.parametrize(
        ("fallback", "kinds"), [("neural", {"neural", "none"}), ("fast", {"ngram", "pair", "none"}), ("auto", None)]
    )
    def test_every_backup_gives_ars_tokens(self, fallback: Any, kinds: set[str] | None) -> None:
        config = SpeculationConfig(lookahead=3, fan_out="list", fan_out_list=(1, 0, 0, 0), fallback=fallback)
        opposite: Table = lambda history: [-score for score in TARGET(history)]  # noqa: E731
        run = engine(opposite).run("ssd", PROMPT, greedy(60), config)
        assert run.ids == engine().run("ar", PROMPT, greedy(60)).ids
        assert [event.cache for event in run.rounds] == ["compulsory"] + ["miss"] * (len(run.rounds) - 1)
        assert all(event.num_committed >= 1 for event in run.rounds)
        assert run.finished.figures.cache_hit_rate == 0.0
        assert kinds is None or {event.fallback for event in run.rounds} <= kinds
        assert not any(token.origin == "cache_hit" for token in run.tokens)

    def test_hits_name_no_backup_and_misses_name_theirs(self) -> None:
        run = engine().run("ssd", PROMPT, greedy(120), SpeculationConfig(lookahead=3, budget=4))
        found = {event.cache for event in run.rounds}
        assert found == {"compulsory", "hit", "miss"}
        assert all((event.fallback is None) == (event.cache == "hit") for event in run.rounds)
        for before, event in itertools.pairwise(run.rounds):
            outcomes = {(p.accepted, token) for p in event.prepared for token in p.token_ids}
            assert ((before.accepted, before.bonus_token_id) in outcomes) == (event.cache == "hit")
            assert sum(event.fan_out) == 4


class TestSeeds:
    @pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
    @pytest.mark.parametrize("mode", MODES)
    def test_the_same_seed_gives_the_same_answer_and_another_another(self, mode: Mode, rule: Any) -> None:
        subject, config = engine(), SpeculationConfig(rule=rule)

        def answer(seed: int) -> tuple[int, ...]:
            return subject.run(mode, PROMPT, SamplingParams(temperature=1.0, seed=seed, max_new_tokens=40), config).ids

        first = answer(42)
        assert answer(43) != first
        assert answer(42) == first
        assert answer(0) not in (first, answer(43))
        subject.run(mode, [7, 7], SamplingParams(temperature=0.5, seed=42, max_new_tokens=9), config)
        assert answer(42) == first
        assert (
            engine().run(mode, PROMPT, SamplingParams(temperature=1.0, seed=42, max_new_tokens=40), config).ids == first
        )

    @pytest.mark.parametrize("draft", list(DRAFTS))
    @pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 6, "top_p": 0.9}])
    def test_under_shared_noise_all_modes_say_the_same(self, draft: str, sampling: dict[str, Any]) -> None:
        for seed in range(3):
            params = SamplingParams(seed=seed, max_new_tokens=40, **sampling)
            plain = engine().run("ar", PROMPT, params).ids
            for mode, lookahead, fallback in PATHS:
                config = SpeculationConfig(lookahead=lookahead, fallback=fallback)
                assert engine(DRAFTS[draft]).run(mode, PROMPT, params, config).ids == plain

    @pytest.mark.parametrize("service", get_args(ServicePolicy))
    @pytest.mark.parametrize("deepening", get_args(DeepeningPolicy))
    def test_whatever_the_times_the_tokens_are_ars(self, service: Any, deepening: Any) -> None:
        """A clock that jumps makes the policies choose every length; caches and pairs are kept from run to run."""
        served: set[str | None] = set()
        fallbacks: set[str | None] = set()
        for seed, (temperature, fallback) in enumerate(itertools.product((0.0, 0.8), get_args(FallbackPolicy))):
            jumps = iter(partial(random.Random(seed).choice, (1e-6, 1e-4, 1e-3, 0.01)), None)
            clock = itertools.accumulate(jumps)
            draft = ScriptedRunner(PARTLY, V)
            subject = LocalEngine(ScriptedRunner(TARGET, V), draft, is_warm=True, passes=lambda number: number % 7)
            subject.kept = Speculator(draft, clock=clock.__next__)
            config = SpeculationConfig(lookahead=4, fallback=fallback, service=service, deepening=deepening)
            for turn in range(3):
                params = SamplingParams(temperature=temperature, seed=turn, max_new_tokens=40)
                run = subject.run("ssd", [*PROMPT, turn], params, config)
                assert run.ids == engine().run("ar", [*PROMPT, turn], params).ids
                served |= {event.served for event in run.rounds[:-2]}
                fallbacks |= {event.fallback for event in run.rounds}
        assert fallbacks >= {None, "neural", "ngram", "pair"}
        assert served >= ({"full", "short", "plain"} if service == "auto" else {"full"})

    @pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6])
    def test_almost_zero_is_greedy(self, temperature: float) -> None:
        plain = engine().run("ar", PROMPT, greedy(30)).ids
        for mode, rule in itertools.product(MODES, ("shared_noise", "rejection")):
            params = SamplingParams(temperature=temperature, top_p=1e-4, max_new_tokens=30, seed=5)
            assert engine().run(mode, PROMPT, params, SpeculationConfig(rule=rule)).ids == plain  # type: ignore[arg-type]

    @pytest.mark.parametrize("temperature", [1e-4, 0.01])
    @pytest.mark.parametrize("top_p", [1.0, 1e-4])
    def test_small_temperatures_work(self, temperature: float, top_p: float) -> None:
        plain = engine().run("ar", PROMPT, greedy(30)).ids
        for mode, rule in itertools.product(MODES, ("shared_noise", "rejection")):
            params = SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=30)
            run = engine().run(mode, PROMPT, params, SpeculationConfig(rule=rule))  # type: ignore[arg-type]
            assert run.finished.status == "finished"
            # At 1e-4 two scores would have to be closer than a thousandth for anything but the best to be drawn.
            assert temperature > 1e-4 or run.ids == plain


class TestContextLimits:
    def limited(self, target: int, draft: int) -> ServedEngine:
        return ServedEngine(
            ScriptedRunner(TARGET, V, context_length=target), ScriptedRunner(PARTLY, V, context_length=draft)
        )

    @pytest.mark.parametrize("prompt_length", [1, 60, 63])
    @pytest.mark.parametrize("mode", MODES)
    def test_the_answer_ends_at_the_limit(self, mode: Mode, prompt_length: int) -> None:
        prompt = [number % V for number in range(prompt_length)]
        run = self.limited(64, 64).run(mode, prompt, greedy(100), SpeculationConfig(lookahead=8, budget=64))
        assert (run.finished.status, run.finished.stop_reason) == ("finished", "length"), run.finished.error
        assert len(run.ids) == 64 - prompt_length
        assert run.ids == self.limited(64, 64).run("ar", prompt, greedy(100)).ids

    @pytest.mark.parametrize("fallback", ["neural", "fast", "auto"])
    @pytest.mark.parametrize("mode", SPECULATIVE)
    @pytest.mark.parametrize("prompt_length", [1, 25, 31, 32, 33, 50])
    def test_past_the_drafts_limit_the_answer_goes_on_without_speculation(
        self, mode: Mode, fallback: Any, prompt_length: int
    ) -> None:
        prompt = [number % V for number in range(prompt_length)]
        config = SpeculationConfig(lookahead=8, budget=64, fallback=fallback)
        run = self.limited(64, 32).run(mode, prompt, greedy(100), config)
        assert (run.finished.status, run.finished.stop_reason) == ("finished", "length"), run.finished.error
        assert run.ids == self.limited(64, 32).run("ar", prompt, greedy(100)).ids
        notices = [event.message for event in run.events if isinstance(event, Notice)]
        assert notices == ["The draft's context is full: the answer goes on without speculation."]
        reached = prompt_length
        for event in run.rounds:
            assert reached + event.drafted <= max(32, reached)
            reached += event.num_committed

    def test_a_prompt_that_fills_the_context_leaves_no_answer(self) -> None:
        with pytest.raises(ValueError, match="context_room 0: give at least 1"):
            self.limited(64, 64).run("ar", [0] * 64, greedy(1))


class TestCounts:
    def test_a_pattern_of_matches_counts_up_to_the_first_difference(self) -> None:
        """Drafted tokens 1, 3 and 4 of a block equal the target's, 2 does not: one of four is accepted."""

        def second_wrong(history: tuple[int, ...]) -> list[float]:
            scores = list(TARGET(history))
            return [-score for score in scores] if len(history) == len(PROMPT) + 1 else scores

        run = engine(second_wrong).run("sd", PROMPT, greedy(30), SpeculationConfig(lookahead=4))
        first = run.rounds[0]
        assert (first.drafted, first.accepted, first.num_committed) == (4, 1, 2)

    @pytest.mark.parametrize("draft", list(DRAFTS))
    @pytest.mark.parametrize("mode", MODES)
    def test_figures_follow_the_ids_and_the_rounds(self, mode: Mode, draft: str) -> None:
        run = engine(DRAFTS[draft]).run(mode, PROMPT, greedy(64), SpeculationConfig(lookahead=4))
        figures, rounds = run.finished.figures, run.rounds
        assert figures.num_tokens == len(run.ids) == 64 == sum(event.num_committed for event in rounds)
        assert figures.num_draft_tokens == sum(event.drafted for event in rounds)
        assert figures.num_accepted_draft_tokens == sum(event.accepted for event in rounds)
        by_origin = {
            origin: sum(token.origin == origin for token in run.tokens)
            for origin in ("target", "draft", "cache_hit", "fallback", "bonus")
        }
        helped = by_origin["draft"] + by_origin["cache_hit"] + by_origin["fallback"]
        assert helped == figures.num_accepted_draft_tokens
        assert by_origin["target"] == (64 if mode == "ar" else 0)
        assert by_origin["bonus"] == (0 if mode == "ar" else len(rounds))
        if mode == "ar":
            assert figures.draft_acceptance_rate is None
        else:
            assert figures.draft_acceptance_rate == helped / figures.num_draft_tokens

    @pytest.mark.parametrize("mode", MODES)
    def test_speed_counts_ids_after_the_first_commit_not_deliveries(self, mode: Mode) -> None:
        run = engine(TARGET).run(mode, PROMPT, greedy(64), SpeculationConfig(lookahead=8))
        times = [token.time for token in run.tokens]
        first = sum(time == times[0] for time in times)
        speed = run.finished.figures.decode_tokens_per_second
        assert speed == pytest.approx((64 - first) / (times[-1] - times[0]))
        assert first == run.rounds[0].num_committed
        assert run.finished.figures.time_to_first_token == times[0]

    def test_what_was_served_and_what_the_draft_fitted_is_told(self) -> None:
        config = SpeculationConfig(lookahead=4, fallback="fast")
        run = engine().run("ssd", PROMPT, greedy(120), config)
        figures, counts = run.finished.figures, Counter(event.served for event in run.rounds)
        told = figures.num_rounds_full, figures.num_rounds_short, figures.num_rounds_plain
        assert told == (counts["full"], counts["short"], counts["plain"])
        assert sum(told) == len(run.rounds)
        assert counts["plain"] == sum(event.drafted == 0 for event in run.rounds)
        last = run.rounds[-1].estimates
        assert last is not None
        assert (figures.fitted_acceptance_hit, figures.fitted_power_law_r_hit) == (
            last.acceptance_hit, last.power_law_r_hit
        )  # fmt: skip
        fitted = figures.fitted_acceptance_hit, figures.fitted_acceptance_miss
        assert all(a is not None and 0 < a < 1 for a in fitted)
        assert fitted != (0.5, 0.5)
        for mode in ("ar", "sd"):
            figures = engine().run(mode, PROMPT, greedy(20), config).finished.figures
            assert (figures.num_rounds_full, figures.fitted_acceptance_hit) == (0, None)
            assert figures.num_reused_prompt_tokens == 0
            assert figures.num_reused_draft_tokens == (None if mode == "ar" else 0)

    def test_alternatives_and_probabilities_describe_the_target(self) -> None:
        run = engine().run("ssd", PROMPT, greedy(40))
        for token in run.tokens:
            assert token.alternatives[0].token_id == token.token_id
            assert token.p == pytest.approx(token.alternatives[0].p)
            assert (token.q is None) == (token.origin in ("bonus", "target"))
