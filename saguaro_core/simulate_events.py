"""The discrete-event core: two devices that exchange verdicts and speculations over a link, on one clock.

Nothing here knows a closed form. A wait is the time between the moment the target could start and the moment the
speculation is there; what makes it wait (a forward of the draft that has begun, a fallback, the link, another
sequence's miss) follows from the order of events.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from numpy.random import Generator

from saguaro_core.fan_out import CacheState
from saguaro_core.simulate_model import Scenario, at_position

Place = Literal["target", "draft"]
Action = Callable[[], None]


@dataclass(frozen=True, slots=True)
class SimEvent:
    """Something that happened, at `time` milliseconds."""

    time: float
    place: Place
    what: str
    round_index: int


class Clock:
    """Runs actions in order of time; at one time, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def after(self, delay: float, action: Action) -> None:
        """Do `action` in `delay` milliseconds."""
        heapq.heappush(self._queue, (self.now + delay, next(self._order), action))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round decided for one sequence: `accepted` of `drafted` tokens, and how many may be drafted next.

    `accepted` is None for the first round's request, which has no outcome to look up.
    """

    sequence: int
    drafted: int
    accepted: int | None
    limit: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """A speculation of `length` tokens for one sequence; `state` is None where no cache was looked up."""

    sequence: int
    length: int
    state: CacheState | None


@dataclass(slots=True)
class Draft:
    """The draft's devices, working in step: they answer verdicts, and build the cache in between (SSD only).

    Branches are split evenly over the devices; trunk and backup are chains, which more devices do not shorten.
    """

    scenario: Scenario
    clock: Clock
    random: Generator
    note: Callable[[Place, str], None]
    send: Callable[[list[Drafted]], None]
    build_ms: list[float] = field(default_factory=list)
    _drafted: dict[int, Drafted] = field(default_factory=dict)
    _shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _waiting: list[Verdict] | None = None
    _hits: dict[int, bool] | None = None
    _depth: int | None = None
    _is_building: bool = False
    _is_in_pass: bool = False
    _build_started: float = 0.0

    def receive(self, verdicts: list[Verdict]) -> None:
        """A verdict arrives. A forward that has begun is not broken off."""
        self.note("draft", "verdict received")
        self._waiting = verdicts
        if not self._is_in_pass:
            self._consider()

    def end(self) -> None:
        """The answers are complete: nothing is left to build."""
        self._is_building = False
        self._drafted.clear()

    def _consider(self) -> None:
        """Between two forwards: serve what waits, else go on building."""
        if self._waiting is not None:
            if self._hits is None:
                self._hits = {v.sequence: self._is_hit(v) for v in self._waiting}
            must_wait = self.scenario.plan.early == "wait" and self._is_building and any(self._hits.values())
            if not must_wait:
                self._serve(self._waiting, self._hits)
                return
        if self._is_building:
            self._next_pass()

    def _is_hit(self, verdict: Verdict) -> bool:
        if self.scenario.mode != "ssd" or verdict.accepted is None:
            return False
        if not self._depth and self.scenario.plan.early != "wait":
            return False
        state = self._drafted[verdict.sequence].state or "miss"
        shape = self._shape(verdict.drafted, state)
        return self.random.random() < self.scenario.chances.hit_chance(verdict.accepted, shape, state)

    def _serve(self, verdicts: list[Verdict], hits: dict[int, bool]) -> None:
        self._waiting = self._hits = None
        if self._is_building:
            self._end_build()
        answer = [self._drafted_for(verdict, hits[verdict.sequence]) for verdict in verdicts]
        num_passes, num_rows = self._late_forwards(answer, hits)
        if num_passes:
            self.note("draft", f"{num_passes} forwards just in time")
        delay = self.scenario.times.serve + num_passes * self.scenario.times.draft.ms(max(1, num_rows))
        self._is_in_pass = True
        self.clock.after(delay, lambda: self._answer(answer))

    def _drafted_for(self, verdict: Verdict, is_hit: bool) -> Drafted:
        plan = self.scenario.plan
        length = plan.lookahead if plan.early == "full" else self._depth or 0
        state: CacheState = "hit" if is_hit else "miss"
        # The first round could not hit, so it counts as neither.
        known = None if verdict.accepted is None else state
        return Drafted(verdict.sequence, min(length if is_hit else plan.backup_tokens, verdict.limit), known)

    def _late_forwards(self, answer: list[Drafted], hits: dict[int, bool]) -> tuple[int, int]:
        """Forwards that the answer still needs, all sequences in step, and the rows of each."""
        ready = {d.sequence: (self._depth or 0) if hits[d.sequence] else 0 for d in answer}
        lengths = [d.length - ready[d.sequence] for d in answer if hits[d.sequence] or self._drafts_just_in_time]
        late = [length for length in lengths if length > 0]
        return max(late, default=0), len(late)

    @property
    def _drafts_just_in_time(self) -> bool:
        return self.scenario.mode == "sd" or self.scenario.plan.backup == "neural"

    def _answer(self, answer: list[Drafted]) -> None:
        self._is_in_pass = False
        self._drafted = {d.sequence: d for d in answer}
        self.note("draft", "speculation sent")
        self.clock.after(self.scenario.times.link, lambda: self.send(answer))
        if self.scenario.mode == "ssd":
            self._is_building, self._depth, self._build_started = True, None, self.clock.now
            self._next_pass()

    def _next_pass(self) -> None:
        """One forward: the trunk's missing keys and values first, then all branches, a token each."""
        times = self.scenario.times
        rows = self._trunk_rows() if self._depth is None else self._branch_rows()
        self.note("draft", "trunk forward" if self._depth is None else f"branch forward {self._depth + 1}")
        self._is_in_pass = True
        self.clock.after(times.draft.ms(max(1, rows)) + (times.plant if self._depth is None else 0.0), self._pass_done)

    def _trunk_rows(self) -> int:
        """The last drafted token of each sequence, or all of a backup's that the draft has not read."""
        is_unread = self.scenario.plan.backup == "fast"
        return sum(1 + (d.length if is_unread and d.state == "miss" else 0) for d in self._drafted.values())

    def _branch_rows(self) -> int:
        rows = sum(sum(self._shape(d.length, d.state or "miss")) for d in self._drafted.values())
        return -(-rows // self.scenario.plan.num_draft_devices)

    def _shape(self, drafted: int, state: CacheState) -> tuple[int, ...]:
        key = drafted * 2 + (state == "hit")
        if key not in self._shapes:
            chances = self.scenario.chances
            self._shapes[key] = self.scenario.plan.shape(drafted, chances.of(state), chances.power_law_r)
        return self._shapes[key]

    def _pass_done(self) -> None:
        self._is_in_pass = False
        self._depth = 0 if self._depth is None else self._depth + 1
        if self._is_building and self._depth >= self.scenario.plan.lookahead:
            self._end_build()
        self._consider()

    def _end_build(self) -> None:
        self._is_building = False
        self.build_ms.append(self.clock.now - self._build_started)
        self.note("draft", f"build ends, {self._depth or 0} tokens deep")


def accepted_of(drafted: Drafted, scenario: Scenario, random: Generator) -> int:
    """How many drafted tokens the target accepts."""
    acceptance = scenario.chances.sd if scenario.mode == "sd" else scenario.chances.of(drafted.state or "miss")
    for place in range(drafted.length):
        if random.random() >= at_position(acceptance, place):
            return place
    return drafted.length
