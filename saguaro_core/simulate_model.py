"""What a simulation takes: times, chances, the plan of a request, and the machines. Times are in milliseconds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from saguaro_core.config import FanOutPolicy, Mode
from saguaro_core.fan_out import CacheState, geometric_fan_out, uniform_fan_out
from saguaro_core.theory import require_at_least, require_share, tokens_per_round

BackupKind = Literal["neural", "fast"]
EarlyPolicy = Literal["ready", "full", "wait"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of one forward by its number of rows: straight lines between the points, the last one going on.

    Below the first point, and with one point only, the time does not change.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.points or any(a[0] >= b[0] for a, b in zip(self.points, self.points[1:], strict=False)):
            raise ValueError(f"points is {self.points!r}: give pairs of rows and milliseconds, rows rising.")
        for rows, ms in self.points:
            require_at_least("rows of a forward", rows, 1)
            require_at_least("time of a forward", ms, 0.0)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "18.3" or "1:18.3,8:20.4". Raises ValueError that says what to write."""
        try:
            parts = [part.partition(":") for part in text.split(",")]
            return cls(tuple((int(rows), float(ms)) if colon else (1, float(rows)) for rows, colon, ms in parts))
        except ValueError as error:
            raise ValueError(f"time {text!r}: write milliseconds, or ROWS:MS pairs as 1:35,4:43. {error}") from error

    def ms(self, rows: int) -> float:
        """The time of a forward over `rows` rows."""
        (low, ms), *rest = self.points
        if rows <= low or not rest:
            return ms
        for high, high_ms in rest:
            slope = (high_ms - ms) / (high - low)
            if rows <= high or (high, high_ms) == rest[-1]:
                return max(0.0, ms + slope * (rows - low))
            low, ms = high, high_ms
        raise AssertionError("the last point ends the loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """verify, draft: one forward of the target and of the draft. serve: what an answer costs the draft besides
    forwards. plant: choosing the outcomes to prepare. overhead: the target's work between a verdict and its next
    round. link: one way between the devices.
    """

    verify: Cost
    draft: Cost
    serve: float = 0.0
    plant: float = 0.0
    overhead: float = 0.0
    link: float = 0.0

    def __post_init__(self) -> None:
        for name in ("serve", "plant", "overhead", "link"):
            require_at_least(f"{name} time", getattr(self, name), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """How speculations fare. after_hit, after_miss and sd hold the acceptance of each drafted token given that those
    before it were accepted, the last entry going on for the tokens behind it.

    The real bonus token is beyond the first F candidates with probability (F + 1)^-r. After all drafted tokens were
    accepted, its rank follows `power_law_r_all`; None takes the law in which the best candidate, the draft's own
    next token, is right as often as a drafted token is accepted. `hit_rate` overrides both laws.
    """

    after_hit: tuple[float, ...]
    after_miss: tuple[float, ...]
    sd: tuple[float, ...]
    power_law_r: float = 1.0
    power_law_r_all: float | None = None
    hit_rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("after_hit", "after_miss", "sd"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"acceptance {name} is empty: give at least one number from 0 to 1.")
            for value in values:
                require_share(f"acceptance {name}", value)
        require_at_least("power_law_r", self.power_law_r, 0.0)
        require_at_least("power_law_r_all", self.power_law_r_all or 0.0, 0.0)
        require_share("hit_rate", self.hit_rate or 0.0)

    @classmethod
    def alike(cls, acceptance: float, *, power_law_r: float = 1.0, hit_rate: float | None = None) -> Self:
        """One acceptance for every position and state."""
        same = (acceptance,)
        return cls(after_hit=same, after_miss=same, sd=same, power_law_r=power_law_r, hit_rate=hit_rate)

    def of(self, state: CacheState) -> tuple[float, ...]:
        """Acceptance by position after a hit or a miss."""
        return self.after_hit if state == "hit" else self.after_miss

    def hit_chance(self, accepted: int, fan_out: Sequence[int], state: CacheState) -> float:
        """Probability that an outcome with `accepted` tokens is among the prepared ones."""
        if self.hit_rate is not None:
            return self.hit_rate
        is_all = accepted == len(fan_out) - 1
        exponent = self._r_all(accepted, state) if is_all else self.power_law_r
        return 1.0 - math.pow(fan_out[accepted] + 1.0, -exponent)

    def _r_all(self, accepted: int, state: CacheState) -> float:
        if self.power_law_r_all is not None:
            return self.power_law_r_all
        rejection = 1.0 - at_position(self.of(state), accepted)
        return math.inf if rejection <= 0.0 else max(self.power_law_r, -math.log2(rejection))


def at_position(acceptance: Sequence[float], position: int) -> float:
    """The acceptance of the drafted token at a 0-based position."""
    return acceptance[min(position, len(acceptance) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request and its machines. `backup_lookahead` is how many tokens the backup drafts (None: K); the neural
    backup needs a forward for each, the fast one none. `early` is what a verdict that comes before the cache is
    complete gets: what is `ready` of its branch, that branch drafted on until it is `full`, or a `wait` for the whole
    cache. `num_tokens` are decoded per sequence, `num_answers` times over.
    """

    lookahead: int = 3
    budget: int = 12
    fan_out: FanOutPolicy = "geometric"
    fan_out_list: tuple[int, ...] = ()
    backup: BackupKind = "neural"
    backup_lookahead: int | None = None
    early: EarlyPolicy = "ready"
    batch_size: int = 1
    num_tokens: int = 128
    num_answers: int = 20
    num_target_devices: int = 1
    num_draft_devices: int = 1

    def __post_init__(self) -> None:
        names = ("lookahead", "budget", "batch_size", "num_tokens", "num_answers", "num_target_devices")
        for name in (*names, "num_draft_devices"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("backup_lookahead", self.backup_lookahead or 0, 0)
        if self.fan_out == "list" and len(self.fan_out_list) != self.lookahead + 1:
            raise ValueError(f"fan_out_list is {self.fan_out_list!r}: give {self.lookahead + 1} counts, one per k.")

    @property
    def backup_tokens(self) -> int:
        """Tokens that the backup drafts."""
        return self.lookahead if self.backup_lookahead is None else self.backup_lookahead

    def shape(self, drafted: int, acceptance: Sequence[float], power_law_r: float) -> tuple[int, ...]:
        """F_k for k = 0..drafted, as saguaro_core.fan_out has it."""
        if self.fan_out == "list":
            return self.fan_out_list[:drafted] + self.fan_out_list[-1:]
        if self.fan_out == "uniform":
            return uniform_fan_out(drafted, self.budget)
        mean = sum(at_position(acceptance, k) for k in range(max(1, drafted))) / max(1, drafted)
        return geometric_fan_out(drafted, self.budget, min(0.99, max(0.01, mean)), max(0.01, power_law_r))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One mode on one machine."""

    mode: Mode
    times: Times
    chances: Chances
    plan: Plan = field(default_factory=Plan)

    @property
    def num_devices(self) -> int:
        """Devices that work at the same time: the draft's count under SSD only."""
        return self.plan.num_target_devices + (self.plan.num_draft_devices if self.mode == "ssd" else 0)

    def mean_tokens(self, state: CacheState) -> float:
        """E of a full-length speculation after a hit or a miss."""
        drafted = self.plan.lookahead if state == "hit" else self.plan.backup_tokens
        return tokens_per_round(self.chances.of(state), drafted)
