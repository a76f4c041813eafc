"""How fast speculation should be: the closed forms of arXiv 2603.03251 and the prediction for a measured run.

Times are in units of one target verification and speeds in tokens per verification and sequence, so autoregressive
decoding has speed 1 where a verification of several tokens costs no more than a decode of one. Letters follow the
paper: a acceptance probability per token, K lookahead, p hit rate, E expected tokens per round, T_p time to build one
cache, T_b time of the backup, b batch size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from saguaro_core.run_figures import RunFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """What speculates after a miss: E_miss, its expected tokens per round, and T_b, the time it takes."""

    tokens_per_round: float
    time: float

    def __post_init__(self) -> None:
        require_at_least("tokens_per_round of a backup", self.tokens_per_round, 1.0)
        require_at_least("time of a backup", self.time, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSpeed:
    """Predicted ratios of tokens per second; None where the run does not say enough."""

    sd_over_ar: float | None = None
    ssd_over_ar: float | None = None
    ssd_over_sd: float | None = None


def expected_tokens(acceptance: float, lookahead: int) -> float:
    """E: expected tokens per round, bonus included, 1 + a + ... + a^K (Leviathan et al., arXiv 2211.17192)."""
    require_share("acceptance", acceptance)
    require_at_least("lookahead", lookahead, 0)
    return math.fsum(acceptance**k for k in range(lookahead + 1))


def tokens_per_round(acceptance: Sequence[float], lookahead: int) -> float:
    """E where each drafted token has its own acceptance, given that those before it were accepted; the last entry
    goes on for the tokens behind it.
    """
    require_at_least("lookahead", lookahead, 0)
    tokens = survives = 1.0
    for k in range(lookahead):
        survives *= acceptance[min(k, len(acceptance) - 1)]
        tokens += survives
    return tokens


def acceptance_for(tokens: float, lookahead: int) -> float:
    """The acceptance per token at which `lookahead` drafted tokens give `tokens` per round; out of reach is clipped."""
    require_at_least("tokens per round", tokens, 1.0)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, lookahead) < tokens else (low, middle)
    return (low + high) / 2


def sd_speed(tokens_per_round: float, draft_time: float) -> float:
    """Speculative decoding, E / (1 + T_SD): the target waits for every draft (Theorem 7's baseline)."""
    require_at_least("tokens_per_round", tokens_per_round, 1.0)
    require_at_least("draft_time", draft_time, 0.0)
    return tokens_per_round / (1.0 + draft_time)


def ssd_speed(
    hit_rate: float, tokens_after_hit: float, backup: Backup, build_time: float, *, batch_size: int = 1
) -> float:
    """Speculative speculative decoding (Theorem 7; Theorem 17 for a batch).

    A round takes max(1, T_p) when all b sequences hit, with probability p^b, and 1 + T_b when any of them misses.
    """
    require_share("hit_rate", hit_rate)
    require_at_least("tokens_after_hit", tokens_after_hit, 1.0)
    require_at_least("build_time", build_time, 0.0)
    require_at_least("batch_size", batch_size, 1)
    tokens = hit_rate * tokens_after_hit + (1.0 - hit_rate) * backup.tokens_per_round
    all_hit = hit_rate**batch_size
    return tokens / (all_hit * max(1.0, build_time) + (1.0 - all_hit) * (1.0 + backup.time))


def critical_batch_size(
    hit_rate: float, tokens_after_hit: float, neural: Backup, fast: Backup, build_time: float
) -> int | None:
    """b* of Theorem 17: the smallest batch at which the fast backup is faster than the neural one; None if never.

    Between batch sizes only x = p^b changes, and "fast wins" is a linear inequality in x, so b* has a closed form.
    """

    def fast_wins(batch_size: int) -> bool:
        speeds = (
            ssd_speed(hit_rate, tokens_after_hit, backup, build_time, batch_size=batch_size)
            for backup in (fast, neural)
        )
        return next(speeds) > next(speeds)

    if fast_wins(1):
        return 1
    if not 0.0 < hit_rate < 1.0:
        return None
    threshold = _winning_all_hit_share(hit_rate, tokens_after_hit, neural, fast, build_time)
    if threshold <= 0.0:
        return None
    batch_size = max(1, math.floor(math.log(threshold) / math.log(hit_rate)))
    return next((b for b in range(batch_size, batch_size + 3) if fast_wins(b)), None)


def _winning_all_hit_share(
    hit_rate: float, tokens_after_hit: float, neural: Backup, fast: Backup, build_time: float
) -> float:
    """The x in 0..1 below which the fast backup wins, given that it loses at b = 1; 0 if it never does.

    Fast wins while N_f * (x*m + (1 - x)*(1 + T_n)) > N_n * (x*m + (1 - x)*(1 + T_f)), with m = max(1, T_p).
    """
    hit_time = max(1.0, build_time)
    tokens_fast, tokens_neural = (
        hit_rate * tokens_after_hit + (1.0 - hit_rate) * backup.tokens_per_round for backup in (fast, neural)
    )
    at_no_hits = tokens_fast * (1.0 + neural.time) - tokens_neural * (1.0 + fast.time)
    at_all_hits = (tokens_fast - tokens_neural) * hit_time
    if at_no_hits <= 0.0:
        return 0.0
    return at_no_hits / (at_no_hits - at_all_hits)


def predict(figures: RunFigures, *, ar: RunFigures | None = None, sd: RunFigures | None = None) -> PredictedSpeed:
    """What the speed model says for the acceptance, hit rate and times that a run measured.

    The unit of time is one round of that run without its wait: a verification of 1 + K rows in SD and SSD, of one row
    in AR, and the target's own work around it. `ar` and `sd` are the paired runs, where there are any. Without `ar`,
    a verification is taken to cost as much as a decode. Without `sd`, SD is taken to accept as this run did and to
    draft as its neural backup does.
    """
    ar_speed = _per_ms(1.0, _unit_ms(ar or figures))
    sd_predicted = _sd_per_ms(sd or figures)
    ssd_predicted = _ssd_per_ms(figures)
    return PredictedSpeed(
        sd_over_ar=_over(sd_predicted, ar_speed),
        ssd_over_ar=_over(ssd_predicted, ar_speed),
        ssd_over_sd=_over(ssd_predicted, sd_predicted),
    )


def _unit_ms(figures: RunFigures) -> float | None:
    """A verification and what a round holds besides it and the wait; a run without round times has the former only."""
    verify = figures.mean_verify_ms
    if verify is None or figures.mean_round_ms is None:
        return verify
    return max(verify, figures.mean_round_ms - (figures.mean_wait_ms or 0.0))


def _sd_per_ms(figures: RunFigures) -> float | None:
    unit, draft_ms = _unit_ms(figures), _speculation_ms(figures)
    if not unit or draft_ms is None or figures.mean_acceptance_length is None:
        return None
    return _per_ms(sd_speed(figures.mean_acceptance_length, draft_ms / unit), unit)


def _speculation_ms(figures: RunFigures) -> float | None:
    """What one speculation costs the draft just in time: a forward per drafted token in SD, the backup in SSD."""
    if figures.mean_step_ms is None or not figures.num_spec_steps:
        return figures.mean_fallback_ms
    return figures.mean_step_ms * figures.num_draft_tokens / figures.num_spec_steps


def _ssd_per_ms(figures: RunFigures) -> float | None:
    unit, hit_rate = _unit_ms(figures), figures.cache_hit_rate
    if not unit or hit_rate is None:
        return None
    backup = Backup(
        tokens_per_round=figures.mean_acceptance_length_miss or 1.0,
        time=(figures.mean_fallback_ms or 0.0) / unit,
    )
    after_hit = figures.mean_acceptance_length_hit or 1.0
    return _per_ms(ssd_speed(hit_rate, after_hit, backup, (figures.mean_build_ms or 0.0) / unit), unit)


def _per_ms(speed: float, unit_ms: float | None) -> float | None:
    return speed / unit_ms if unit_ms else None


def _over(speed: float | None, base: float | None) -> float | None:
    return speed / base if speed is not None and base else None


def require_share(name: str, value: float) -> None:
    """Refuse what is no probability. Raises ValueError that names the value."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value!r}: give a number from 0 to 1.")


def require_at_least(name: str, value: float, least: float) -> None:
    """Refuse what is not finite or too small. Raises ValueError that names the value."""
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} is {value!r}: give a finite number from {least:g}.")
