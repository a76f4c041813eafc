"""Runs a scenario: the target's side of the event simulation, and the figures that come out of it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from saguaro_core.config import Mode
from saguaro_core.simulate_events import Clock, Draft, Drafted, Place, SimEvent, Verdict, accepted_of
from saguaro_core.simulate_model import Scenario

Trace = Callable[[SimEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """What a simulated mode did. Speeds count the tokens after each answer's first commit, over the time since it.

    tokens_per_second is the batch's throughput; per sequence it is a user's speed. tokens_per_round, hit_rate and
    tokens after a hit or a miss are per sequence and round; wait_share is the target's waiting over all its time.
    None where nothing of the kind happened.
    """

    mode: Mode
    num_tokens: int
    seconds: float
    tokens_per_second: float
    tokens_per_second_per_sequence: float
    tokens_per_second_per_device: float
    num_rounds: int
    mean_round_ms: float
    mean_wait_ms: float
    wait_share: float
    tokens_per_round: float
    hit_rate: float | None
    tokens_after_hit: float | None
    tokens_after_miss: float | None
    mean_build_ms: float | None


@dataclass(slots=True)
class _Totals:
    """Sums over rounds after the first of each answer."""

    num_tokens: int = 0
    num_rounds: int = 0
    num_turns: int = 0
    ms: float = 0.0
    wait_ms: float = 0.0
    turns: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Target:
    """The target's device: verifies as soon as it is free and a speculation is there.

    A sequence that has its tokens leaves the batch; an answer ends when all have left, and the next one begins.
    """

    scenario: Scenario
    clock: Clock
    random: Generator
    trace: Trace | None
    tell: Callable[[list[Verdict]], None] = lambda verdicts: None
    end: Callable[[], None] = lambda: None
    totals: _Totals = field(default_factory=_Totals)
    round_index: int = 0
    _remaining: dict[int, int] = field(default_factory=dict)
    _num_answers: int = 0
    _free_at: float = 0.0
    _first_commit: float | None = None
    _last_commit: float = 0.0
    _wait: float = 0.0

    def note(self, place: Place, what: str) -> None:
        if self.trace is not None:
            self.trace(SimEvent(self.clock.now, place, what, self.round_index))

    def begin(self) -> None:
        """Start the next answer: its first round has nothing to look up."""
        plan = self.scenario.plan
        if self._num_answers == plan.num_answers:
            return
        self._num_answers += 1
        self._remaining = dict.fromkeys(range(plan.batch_size), plan.num_tokens)
        self._first_commit, self._free_at = None, self.clock.now
        self.tell([Verdict(i, 0, None, self._limit(i)) for i in self._remaining])

    def _limit(self, sequence: int) -> int:
        """With its bonus token a round must not pass the answer's end."""
        return min(self.scenario.plan.lookahead, self._remaining[sequence] - 1)

    def receive(self, speculations: list[Drafted]) -> None:
        """A speculation arrives, before or after the target is free for it."""
        start = max(self.clock.now, self._free_at)
        self._wait = start - self._free_at
        self.clock.after(start - self.clock.now, lambda: self._verify(speculations))

    def _verify(self, speculations: list[Drafted]) -> None:
        """One forward over 1 + K rows for each sequence: shorter speculations are padded to the longest."""
        rows = len(speculations) * (1 + max(d.length for d in speculations))
        self.note("target", f"verify of {rows} rows begins after a wait of {self._wait:.2f} ms")
        self.clock.after(self.scenario.times.verify.ms(rows), lambda: self._decide(speculations))

    def _decide(self, speculations: list[Drafted]) -> None:
        verdicts = [verdict for d in speculations if (verdict := self._commit(d)) is not None]
        self._count_round()
        self._free_at = self.clock.now + self.scenario.times.overhead
        self.note("target", f"verdict on {len(speculations)} sequences")
        self.round_index += 1
        if verdicts:
            self.clock.after(self.scenario.times.link, lambda: self.tell(verdicts))
            return
        self.end()
        self.clock.after(self.scenario.times.overhead, self.begin)

    def _commit(self, drafted: Drafted) -> Verdict | None:
        accepted = accepted_of(drafted, self.scenario, self.random)
        tokens = min(accepted + 1, self._remaining[drafted.sequence])
        self._remaining[drafted.sequence] -= tokens
        if self._first_commit is not None:
            self.totals.num_tokens += tokens
            self.totals.num_turns += 1
            if drafted.state is not None:
                self.totals.turns[drafted.state] += 1
                self.totals.tokens[drafted.state] += tokens
        if self._remaining[drafted.sequence] == 0:
            return None
        return Verdict(drafted.sequence, drafted.length, accepted, self._limit(drafted.sequence))

    def _count_round(self) -> None:
        if self._first_commit is None:
            self._first_commit = self._last_commit = self.clock.now
            return
        self.totals.num_rounds += 1
        self.totals.wait_ms += self._wait
        self.totals.ms += self.clock.now - self._last_commit
        self._last_commit = self.clock.now


def simulate(scenario: Scenario, *, seed: int = 0, trace: Trace | None = None) -> SimResult:
    """Run the scenario from the first verdict to the last. The same seed gives the same events."""
    clock, random = Clock(), np.random.default_rng(seed)
    target = _Target(scenario, clock, random, trace)
    build_ms: list[float] = []
    if scenario.mode == "ar":
        target.tell = lambda verdicts: target.receive([Drafted(v.sequence, 0, None) for v in verdicts])
    else:
        draft = Draft(scenario, clock, random, target.note, target.receive, build_ms)
        target.tell, target.end = draft.receive, draft.end
    target.begin()
    clock.run()
    return _result(scenario, target.totals, build_ms)


def _result(scenario: Scenario, totals: _Totals, build_ms: list[float]) -> SimResult:
    if not totals.num_rounds:
        raise ValueError(f"num_tokens is {scenario.plan.num_tokens!r}: give more than one round decodes.")
    speed = 1e3 * totals.num_tokens / totals.ms if totals.ms else float("inf")
    hits, misses = totals.turns["hit"], totals.turns["miss"]
    return SimResult(
        mode=scenario.mode,
        num_tokens=totals.num_tokens,
        seconds=totals.ms / 1e3,
        tokens_per_second=speed,
        tokens_per_second_per_sequence=speed / scenario.plan.batch_size,
        tokens_per_second_per_device=speed / scenario.num_devices,
        num_rounds=totals.num_rounds,
        mean_round_ms=totals.ms / totals.num_rounds,
        mean_wait_ms=totals.wait_ms / totals.num_rounds,
        wait_share=totals.wait_ms / totals.ms if totals.ms else 0.0,
        tokens_per_round=totals.num_tokens / totals.num_turns,
        hit_rate=_ratio(hits, hits + misses) if scenario.mode == "ssd" else None,
        tokens_after_hit=_ratio(totals.tokens["hit"], hits) if scenario.mode == "ssd" else None,
        tokens_after_miss=_ratio(totals.tokens["miss"], misses) if scenario.mode == "ssd" else None,
        mean_build_ms=_ratio(sum(build_ms), len(build_ms)),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
