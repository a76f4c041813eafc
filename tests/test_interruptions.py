"""What goes wrong in the middle of an answer, and a user who stops it: nothing said is lost, nothing goes on."""

import time
from dataclasses import replace
from typing import Any

import pytest
from decoding_runs import BOTH, PROMPT, TARGET, V, ar_ids, check_consistent, engine, greedy
from local_engine import LocalRun
from scripted import ScriptedRunner, hashed, mixed
from served_draft import ServedEngine

from saguaro_core.config import Mode, SpeculationConfig
from saguaro_core.draft.messages import Speculation, Verified
from saguaro_core.errors import DraftUnavailable
from saguaro_core.events import Notice, SpanEvent


class TestFailures:
    def broken(self, at: int, who: str) -> ServedEngine:
        def fail(number: int) -> None:
            if number == at:
                raise RuntimeError("out of paper")

        subject = engine(mixed(TARGET, hashed(V, 2.0, salt=9), 0.2))
        runner = subject.target if who == "target" else subject.draft
        assert isinstance(runner, ScriptedRunner)
        runner.on_forward = fail
        return subject

    @pytest.mark.parametrize("mode", ["ar", *BOTH])
    def test_a_target_that_fails_keeps_what_was_said(self, mode: Mode) -> None:
        subject = self.broken(7, "target")
        run = subject.run(mode, PROMPT, greedy(60))
        assert (run.finished.status, run.finished.stop_reason) == ("failed", "error")
        assert run.finished.error == "RuntimeError: out of paper"
        assert len(run.ids) >= 5
        assert run.ids == ar_ids(60)[: len(run.ids)]
        check_consistent(run)
        again = subject.run(mode, PROMPT, greedy(60))
        assert (again.finished.status, again.ids) == ("finished", ar_ids(60))

    @pytest.mark.parametrize("mode", BOTH)
    @pytest.mark.parametrize("at", [1, 2, 5, 7, 12, 30])
    def test_a_draft_that_fails_costs_its_help_only(self, mode: Mode, at: int) -> None:
        subject = self.broken(at, "draft")
        run = subject.run(mode, PROMPT, greedy(60))
        assert (run.finished.status, run.ids) == ("finished", ar_ids(60))
        notices = [event.message for event in run.events if isinstance(event, Notice)]
        assert len(notices) == 1
        assert "RuntimeError: out of paper" in notices[0]
        assert "goes on without it" in notices[0]
        assert run.tokens[-1].origin == "target"
        assert all(token.origin != "target" for token in run.tokens if token.round_index < self.last_helped(run))
        check_consistent(run)
        assert [event.index for event in run.rounds] == list(range(len(run.rounds)))
        again = subject.run(mode, PROMPT, greedy(60))
        assert again.ids == ar_ids(60)
        assert again.finished.figures.num_accepted_draft_tokens > 0
        assert not any(isinstance(event, Notice) for event in again.events)

    def last_helped(self, run: LocalRun) -> int:
        return max((event.index for event in run.rounds if event.drafted), default=-1) + 1

    @pytest.mark.parametrize("mode", BOTH)
    def test_a_draft_that_dies_during_a_verification_leaves_that_round_as_it_was(self, mode: Mode) -> None:
        subject, told = engine(), 0

        def on_sent(message: object) -> None:
            nonlocal told
            told += isinstance(message, Verified)
            if told == 3:
                raise DraftUnavailable("the draft process was killed by signal 9.")

        subject.on_sent = on_sent
        run = subject.run(mode, PROMPT, greedy(40))
        assert (run.finished.status, run.ids) == ("finished", ar_ids(40))
        notices = [event.message for event in run.events if isinstance(event, Notice)]
        assert notices == [
            "The draft was lost: the draft process was killed by signal 9. The answer goes on without it."
        ]
        origins = {token.round_index: token.origin for token in run.tokens}
        assert [origins[index] for index in range(5)] == ["bonus"] * 3 + ["target"] * 2
        check_consistent(run)

    @pytest.mark.parametrize("mode", BOTH)
    def test_a_draft_that_never_answers_is_given_up(self, mode: Mode) -> None:
        ticks = iter(range(10**6))
        subject = engine(clock=lambda: float(next(ticks)), timeout=20.0)
        silence = 3

        def on_sent(message: object) -> None:
            nonlocal silence
            silence -= isinstance(message, Verified)
            if silence <= 0:
                subject.link.outbox.clear()
                subject.link.send = lambda *messages: None  # type: ignore[method-assign]

        subject.on_sent = on_sent
        run = subject.run(mode, PROMPT, greedy(40))
        assert (run.finished.status, run.ids) == ("finished", ar_ids(40))
        notices = [event.message for event in run.events if isinstance(event, Notice)]
        assert len(notices) == 1
        assert "did not answer within 20 s" in notices[0]

    @pytest.mark.parametrize("mode", BOTH)
    def test_the_wait_for_a_draft_that_never_answers_counts_in_its_round(self, mode: Mode) -> None:
        subject = engine(clock=time.perf_counter, timeout=0.2)

        def on_sent(message: object) -> None:
            if isinstance(message, Verified) and message.round_index == 3:
                subject.link.send = lambda *messages: None  # type: ignore[method-assign]

        subject.on_sent = on_sent
        run = subject.run(mode, PROMPT, greedy(40))
        assert (run.finished.status, run.ids) == ("finished", ar_ids(40))
        waits = [event.wait_ms for event in run.rounds]
        assert waits[3] >= 200
        assert waits[4:] == [0.0] * (len(waits) - 4)
        assert run.finished.figures.mean_wait_ms == pytest.approx(sum(waits) / len(waits))
        (span,) = [e for e in run.events if isinstance(e, SpanEvent) and (e.kind, e.round_index) == ("wait", 3)]
        assert span.end - span.start == pytest.approx(waits[3] / 1e3)
        assert span.end == pytest.approx(run.rounds[3].start)

    def test_answers_to_an_older_request_are_never_used(self) -> None:
        subject = engine()
        late = Speculation(epoch=0, round_index=0, token_ids=(9, 9, 9), cache="hit")
        subject.on_sent = lambda message: subject.link.outbox.extend([late, replace(late, epoch=99)])
        for mode in BOTH:
            run = subject.run(mode, PROMPT, greedy(40), SpeculationConfig(copying="off"))
            assert run.ids == ar_ids(40)
            assert run.finished.figures.draft_acceptance_rate == 1.0
            subject.link.outbox.clear()


class TestStopping:
    @pytest.mark.parametrize("mode", ["ar", *BOTH])
    def test_between_rounds_costs_at_most_one_more_round(self, mode: Mode) -> None:
        subject, stop = engine(), False
        assert isinstance(subject.target, ScriptedRunner)
        seen_at = 0

        def on_events(events: list[Any]) -> None:
            nonlocal stop, seen_at
            if not stop and any(getattr(event, "round_index", None) == 3 for event in events):
                stop, seen_at = True, subject.target.num_forwards  # type: ignore[attr-defined]

        run = subject.run(
            mode, PROMPT, greedy(500), SpeculationConfig(lookahead=2), should_stop=lambda: stop, on_events=on_events
        )
        assert (run.finished.status, run.finished.stop_reason) == ("stopped", "user")
        assert seen_at > 0
        assert subject.target.num_forwards <= seen_at + 1
        assert run.ids == ar_ids(len(run.ids))
        check_consistent(run)
        fresh = engine().run(mode, PROMPT, greedy(50))
        assert subject.run(mode, PROMPT, greedy(50)).ids == fresh.ids

    @pytest.mark.parametrize("mode", ["ar", *BOTH])
    def test_during_prefill(self, mode: Mode) -> None:
        subject = engine()
        target = subject.target
        assert isinstance(target, ScriptedRunner)
        run = subject.run(mode, PROMPT * 10, greedy(50), should_stop=lambda: target.num_forwards >= 2)
        assert (run.finished.status, run.finished.stop_reason, run.ids) == ("stopped", "user", ())
        assert target.num_forwards == 2
        assert run.finished.figures.time_to_first_token is None

    @pytest.mark.parametrize("mode", BOTH)
    def test_while_waiting_for_the_draft(self, mode: Mode) -> None:
        subject = engine()
        subject.link.send = lambda *messages: None  # type: ignore[method-assign]
        ticks = iter(range(10**6))
        subject.clock, subject.timeout = lambda: float(next(ticks)), 50.0
        prefilled: list[Any] = []
        run = subject.run(
            mode,
            PROMPT,
            greedy(50),
            should_stop=lambda: bool(prefilled),
            on_events=lambda events: prefilled.extend(
                event for event in events if getattr(event, "phase", None) == "decode"
            ),
        )
        assert (run.finished.status, run.finished.stop_reason, run.ids) == ("stopped", "user", ())
