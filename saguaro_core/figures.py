"""One definition of every figure: live footers, stored totals and the benchmark all read this accumulator.

Tokens are counted by their ids and by the moment their round committed them, never by stream updates, so AR, SD
and SSD are measured alike. Only the target's rounds and both lanes' spans are read; nothing is timed here.
"""

from bisect import bisect_right, insort
from collections import Counter
from typing import Any

from saguaro_core.config import Mode
from saguaro_core.events import DraftEstimates, Event, PhaseEvent, RoundEvent, SpanEvent, TokenEvent
from saguaro_core.run_figures import RunFigures

__all__ = ["FiguresAccumulator", "RunFigures"]


class FiguresAccumulator:
    """Takes a run's events one at a time and gives its figures at any moment.

    `num_devices` is how many devices work at the same time under SSD; AR and SD keep one busy at a time.
    """

    def __init__(self, mode: Mode, num_devices: int) -> None:
        if num_devices < 1:
            raise ValueError(f"num_devices is {num_devices!r}: give a whole number from 1.")
        self._num_devices = num_devices if mode == "ssd" else 1
        self._has_draft = mode != "ar"
        self._tokens = _TokenClock()
        self._rounds = _RoundTotals()
        self._steps = _Mean()
        self._builds = _WorkPerRound()
        self._fallbacks = _WorkPerRound()
        self._overlap = _Overlap()
        self._num_reused: int | None = None
        self._estimates: DraftEstimates | None = None

    def add(self, event: Event) -> None:
        """Count one event, in constant time (amortised)."""
        match event:
            case TokenEvent():
                self._tokens.add(event.time)
            case RoundEvent():
                self._rounds.add(event)
                self._estimates = event.estimates or self._estimates
            case PhaseEvent() if event.num_reused is not None:
                self._num_reused = event.num_reused
            case SpanEvent():
                self._add_span(event)

    def _add_span(self, span: SpanEvent) -> None:
        match span.lane, span.kind:
            case "target", "verify":
                self._overlap.add_verify(span.start, span.end)
            case "draft", "step":
                self._steps.add(span.end - span.start)
            case "draft", "fallback":
                self._fallbacks.add(span)
            case "draft", "build":
                self._builds.add(span)
                self._overlap.add_build(span.start, span.end)

    def figures(self, elapsed: float) -> RunFigures:
        """The figures of what was added so far; `elapsed` is the run's age in seconds."""
        rounds, speed = self._rounds, self._tokens.tokens_per_second()
        return RunFigures(
            num_tokens=self._tokens.count,
            elapsed=elapsed,
            time_to_first_token=self._tokens.first,
            decode_tokens_per_second=speed,
            tokens_per_second_per_device=None if speed is None else speed / self._num_devices,
            num_devices=self._num_devices,
            num_spec_steps=rounds.num_spec_steps,
            num_draft_tokens=rounds.num_drafted,
            num_accepted_draft_tokens=rounds.num_accepted,
            draft_acceptance_rate=_ratio(rounds.num_accepted, rounds.num_drafted),
            mean_acceptance_length=_ratio(rounds.num_spec_steps + rounds.num_accepted, rounds.num_spec_steps),
            acceptance_histogram=tuple(rounds.histogram),
            num_cache_hits=rounds.outcomes["hit"],
            num_cache_misses=rounds.outcomes["miss"],
            cache_hit_rate=_ratio(rounds.outcomes["hit"], rounds.outcomes["hit"] + rounds.outcomes["miss"]),
            mean_verify_ms=_ratio(rounds.verify_ms, rounds.count),
            mean_step_ms=self._steps.mean_ms(),
            mean_build_ms=self._builds.mean_ms(),
            mean_fallback_ms=self._fallbacks.mean_ms(),
            mean_wait_ms=_ratio(rounds.wait_ms, rounds.count) if self._has_draft else None,
            build_overlap=self._overlap.share(),
            mean_acceptance_length_hit=_ratio(rounds.lengths["hit"], rounds.outcomes["hit"]),
            mean_acceptance_length_miss=_ratio(rounds.lengths["miss"], rounds.outcomes["miss"]),
            num_rounds=rounds.count,
            mean_round_ms=rounds.mean_round_ms(),
            num_reused_prompt_tokens=self._num_reused,
            num_rounds_full=rounds.served["full"],
            num_rounds_short=rounds.served["short"],
            num_rounds_plain=rounds.served["plain"],
            **self._estimate_figures(),
        )

    def _estimate_figures(self) -> dict[str, Any]:
        """What the draft estimated, as it said last."""
        known = self._estimates
        if known is None:
            return {}
        return {
            "num_reused_draft_tokens": known.num_reused,
            "fitted_acceptance_hit": known.acceptance_hit,
            "fitted_acceptance_miss": known.acceptance_miss,
            "fitted_power_law_r_hit": known.power_law_r_hit,
            "fitted_power_law_r_miss": known.power_law_r_miss,
            "critical_batch_size": known.critical_batch_size,
        }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class _TokenClock:
    """Counts tokens by commit time. All tokens of the first round share the first time and are not part of the rate."""

    def __init__(self) -> None:
        self.count = 0
        self.first: float | None = None
        self._last = 0.0
        self._num_first = 0

    def add(self, time: float) -> None:
        self.count += 1
        if self.first is None:
            self.first = self._last = time
        if time <= self.first:
            self._num_first += 1
        self._last = max(self._last, time)

    def tokens_per_second(self) -> float | None:
        return None if self.first is None else _ratio(self.count - self._num_first, self._last - self.first)


class _RoundTotals:
    """Sums over rounds. Proposals behind the end of the answer got no verdict that counts and are left out."""

    def __init__(self) -> None:
        self.count = 0
        self.num_spec_steps = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.verify_ms = 0.0
        self.wait_ms = 0.0
        self.histogram: list[int] = []
        self.outcomes: Counter[str] = Counter()
        self.lengths: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self._first_commit = self._last_commit = 0.0

    def mean_round_ms(self) -> float | None:
        return _ratio(self._last_commit - self._first_commit, self.count - 1) if self.count > 1 else None

    def add(self, event: RoundEvent) -> None:
        drafted, accepted = _judged(event)
        self._last_commit = 1000.0 * event.start + event.verify_ms
        if self.count == 0:
            self._first_commit = self._last_commit
        self.count += 1
        self.verify_ms += event.verify_ms
        self.wait_ms += event.wait_ms
        if drafted:
            self._add_speculation(drafted, accepted)
        if event.cache is not None:
            self.outcomes[event.cache] += 1
            self.lengths[event.cache] += accepted + 1
        if event.served is not None:
            self.served[event.served] += 1

    def _add_speculation(self, drafted: int, accepted: int) -> None:
        self.num_spec_steps += 1
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.histogram.extend([0] * (drafted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1


def _judged(event: RoundEvent) -> tuple[int, int]:
    """Drafted and accepted tokens that count: all, unless the answer ended inside the accepted ones.

    A round commits at least one token, so a num_committed of 0 says that the answer was not cut in this round.
    """
    if 0 < event.num_committed <= event.accepted:
        return event.num_committed, event.num_committed
    return event.drafted, event.accepted


class _Mean:
    """Mean time of the draft's forwards."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        self._seconds += seconds
        self._count += 1

    def mean_ms(self) -> float | None:
        return _ratio(1000.0 * self._seconds, self._count)


class _WorkPerRound:
    """Mean time per piece of work. Spans of one round are one piece of work, done in several stretches."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._rounds: set[int] = set()
        self._num_unassigned = 0

    def add(self, span: SpanEvent) -> None:
        self._seconds += span.end - span.start
        if span.round_index is None:
            self._num_unassigned += 1
        else:
            self._rounds.add(span.round_index)

    def mean_ms(self) -> float | None:
        return _ratio(1000.0 * self._seconds, len(self._rounds) + self._num_unassigned)


class _Intervals:
    """Intervals in order of time, disjoint because one device does one thing at a time."""

    def __init__(self) -> None:
        self._intervals: list[tuple[float, float]] = []

    def add(self, start: float, end: float) -> None:
        insort(self._intervals, (start, end))

    def covered(self, start: float, end: float) -> float:
        """How much of start..end lies inside the intervals."""
        total = 0.0
        first = max(bisect_right(self._intervals, (start, start)) - 1, 0)
        for index in range(first, len(self._intervals)):
            left, right = self._intervals[index]
            if left >= end:
                break
            total += max(0.0, min(right, end) - max(left, start))
        return total


class _Overlap:
    """Share of the build time inside verifications. Either lane's spans may arrive late and out of order."""

    def __init__(self) -> None:
        self._builds = _Intervals()
        self._verifies = _Intervals()
        self._build_seconds = 0.0
        self._shared_seconds = 0.0

    def add_build(self, start: float, end: float) -> None:
        self._build_seconds += end - start
        self._shared_seconds += self._verifies.covered(start, end)
        self._builds.add(start, end)

    def add_verify(self, start: float, end: float) -> None:
        self._shared_seconds += self._builds.covered(start, end)
        self._verifies.add(start, end)

    def share(self) -> float | None:
        share = _ratio(self._shared_seconds, self._build_seconds)
        return None if share is None else min(1.0, share)
