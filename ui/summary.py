"""What the lanes of one comparison say together: speed-ups, whether the tokens agree, predicted against measured.

Only complete answers are compared: a failed or stopped run has a speed, but not one to hold against another, nor has
one that lost its draft, for it is partly AR.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from saguaro_core.answers import first_difference
from saguaro_core.config import Mode
from saguaro_core.theory import predict
from ui.lane import LaneState

LOST_DRAFT = "the draft was lost"
RATIOS: tuple[tuple[Mode, Mode], ...] = (("sd", "ar"), ("ssd", "ar"), ("ssd", "sd"))


def summarize(lanes: Mapping[Mode, LaneState], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The strip above the lanes, as plain data."""
    return {
        "ratios": [_ratio(lanes, fast, slow) for fast, slow in RATIOS if fast in lanes and slow in lanes],
        "same": same_tokens(lanes, settings),
        "per_device": {
            mode: {
                "rate": None if lane.has_lost_draft else lane.figures.get("tokens_per_second_per_device"),
                "devices": lane.figures.get("num_devices"),
                "why": LOST_DRAFT if lane.has_lost_draft else None,
            }
            for mode, lane in lanes.items()
            if lane.is_finished
        },
    }


def _ratio(lanes: Mapping[Mode, LaneState], fast: Mode, slow: Mode) -> dict[str, Any]:
    result: dict[str, Any] = {"fast": fast, "slow": slow, "measured": None, "predicted": None, "why": None}
    for mode in (fast, slow):
        if not lanes[mode].is_finished:
            waiting = "running" if lanes[mode].is_active else f"{mode.upper()} {lanes[mode].phase}"
            return {**result, "why": waiting}
    if lanes[fast].has_lost_draft or lanes[slow].has_lost_draft:
        return {**result, "why": LOST_DRAFT}
    speeds = [lanes[mode].figures.get("decode_tokens_per_second") for mode in (fast, slow)]
    if not speeds[0] or not speeds[1]:
        return {**result, "why": "too few tokens to measure"}
    return {**result, "measured": speeds[0] / speeds[1], "predicted": predicted_ratio(lanes, fast, slow)}


def predicted_ratio(lanes: Mapping[Mode, LaneState], fast: Mode, slow: Mode) -> float | None:
    """What the speed model says of two complete lanes, from the acceptance, hit rate and times they measured."""
    results = {mode: lane.result for mode, lane in lanes.items() if lane.is_finished}
    speed = predict(results[fast], ar=results.get("ar"), sd=results.get("sd"))
    ratio = {("sd", "ar"): speed.sd_over_ar, ("ssd", "ar"): speed.ssd_over_ar, ("ssd", "sd"): speed.ssd_over_sd}
    return ratio[fast, slow]


def same_tokens(lanes: Mapping[Mode, LaneState], settings: Mapping[str, Any]) -> dict[str, Any]:
    """{"answer": True, False or None, "text": what to show}; None while fewer than two lanes are complete."""
    complete = {mode: lane.token_ids for mode, lane in lanes.items() if lane.is_finished}
    if len(complete) < 2:
        return {"answer": None, "text": "n/a"}
    differences = [
        f"{one.upper()} and {other.upper()} differ at token {index}"
        for one, other in combinations(complete, 2)
        if (index := first_difference(complete[one], complete[other])) is not None
    ]
    if not differences:
        return {"answer": True, "text": "yes"}
    sampled = settings.get("rule") == "rejection" and settings.get("temperature", 0) > 0
    note = " (as rejection sampling at temperature > 0 draws each lane afresh)" if sampled else ""
    return {"answer": False, "text": f"no: {differences[0]}{note}"}
