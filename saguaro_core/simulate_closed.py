"""The closed forms for a scenario: Theorems 7, 12 and 17 of arXiv 2603.03251, with the parts of a round in units.

They hold where every cache is complete when its outcome is looked up (or waited for), sequences hit independently, and
answers are long. The event simulation needs none of that; where both apply, they agree.
"""

from dataclasses import replace

from saguaro_core.fan_out import CacheState
from saguaro_core.simulate_model import Scenario, at_position
from saguaro_core.theory import Backup, sd_speed, ssd_speed, tokens_per_round


def speed_model(scenario: Scenario) -> float:
    """Tokens per second of the whole batch."""
    plan, times = scenario.plan, scenario.times
    if scenario.mode == "ar":
        return 1e3 * plan.batch_size / (times.verify.ms(plan.batch_size) + times.overhead)
    unit = _unit_ms(scenario)
    if scenario.mode == "sd":
        tokens = tokens_per_round(scenario.chances.sd, plan.backup_tokens)
        per_unit = sd_speed(tokens, _late_ms(scenario, plan.batch_size) / unit)
    else:
        per_unit = _ssd_per_unit(scenario, unit)
    return 1e3 * plan.batch_size * per_unit / unit


def stationary_hit_rate(scenario: Scenario) -> float:
    """The hit rate p at which rounds after hits and rounds after misses balance."""
    after_hit, after_miss = (hit_rate_after(scenario, state) for state in ("hit", "miss"))
    return after_miss / (1.0 - after_hit + after_miss) if after_hit < 1.0 else 1.0


def hit_rate_after(scenario: Scenario, state: CacheState) -> float:
    """Theorem 12's sum: the chance that the outcome of a speculation found in `state` is a key of the cache."""
    plan, chances = scenario.plan, scenario.chances
    drafted = plan.lookahead if state == "hit" else plan.backup_tokens
    acceptance = chances.of(state)
    shape = plan.shape(drafted, acceptance, chances.power_law_r)
    total, survives = 0.0, 1.0
    for k in range(drafted + 1):
        accepted = at_position(acceptance, k) if k < drafted else 0.0
        total += survives * (1.0 - accepted) * chances.hit_chance(k, shape, state)
        survives *= accepted
    return total


def fit_power_law(scenario: Scenario, hit_rate: float) -> Scenario:
    """The scenario with the exponent r that gives `hit_rate` at its acceptances; the law is clipped to 0..50."""
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        is_below = stationary_hit_rate(_with_power_law(scenario, middle)) < hit_rate
        low, high = (middle, high) if is_below else (low, middle)
    return _with_power_law(scenario, (low + high) / 2)


def _with_power_law(scenario: Scenario, power_law_r: float) -> Scenario:
    return replace(scenario, chances=replace(scenario.chances, power_law_r=power_law_r, hit_rate=None))


def _ssd_per_unit(scenario: Scenario, unit: float) -> float:
    plan, hit_rate = scenario.plan, stationary_hit_rate(scenario)
    num_missing = max(1, round(plan.batch_size * (1.0 - hit_rate)))
    backup = Backup(
        tokens_per_round=scenario.mean_tokens("miss"),
        time=_late_ms(scenario, num_missing) / unit if plan.backup == "neural" else 0.0,
    )
    return ssd_speed(
        hit_rate, scenario.mean_tokens("hit"), backup, _build_ms(scenario) / unit, batch_size=plan.batch_size
    )


def _unit_ms(scenario: Scenario) -> float:
    """A round that waits for no draft: a verification, then the longer of the target's own work and the exchange."""
    plan, times = scenario.plan, scenario.times
    verify = times.verify.ms(plan.batch_size * (1 + plan.lookahead))
    return verify + max(times.overhead, _exchange_ms(scenario))


def _exchange_ms(scenario: Scenario) -> float:
    """From a verdict to a speculation that needs no forward."""
    return 2.0 * scenario.times.link + scenario.times.serve


def _late_ms(scenario: Scenario, num_rows: int) -> float:
    """How much longer a round takes whose speculation is drafted just in time."""
    exchange, overhead = _exchange_ms(scenario), scenario.times.overhead
    drafting = scenario.plan.backup_tokens * scenario.times.draft.ms(num_rows)
    return max(overhead, exchange + drafting) - max(overhead, exchange)


def _build_ms(scenario: Scenario) -> float:
    """T_p: from one speculation to the next when the cache is waited for."""
    plan, times = scenario.plan, scenario.times
    shape = plan.shape(plan.lookahead, scenario.chances.after_hit, scenario.chances.power_law_r)
    rows = -(-plan.batch_size * sum(shape) // plan.num_draft_devices)
    trunk = times.draft.ms(plan.batch_size)
    return trunk + times.plant + plan.lookahead * times.draft.ms(max(1, rows)) + times.serve
