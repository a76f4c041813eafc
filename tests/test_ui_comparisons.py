"""The service behind the page: order, stops, failures, followers, and what lanes say together."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_engine import EchoEngine, Script

from saguaro_core.answers import first_difference
from saguaro_core.errors import EngineUnavailable, InvalidRequest
from saguaro_core.events import CacheOutcome, FallbackKind, RoundEvent, TokenEvent
from storage import Recorder
from ui.comparisons import Comparison, ComparisonService
from ui.lane import LaneState
from ui.run_log import StoredRunLog
from ui.settings import CompareSettings


@pytest.fixture
def log(tmp_path: Path) -> Iterator[StoredRunLog]:
    with Recorder(tmp_path / "log.db") as recorder:
        yield StoredRunLog(recorder)


def ready(script: Script) -> EchoEngine:
    engine = EchoEngine(script)
    engine.start()
    if not script.load_seconds:
        engine.wait_ready(5)
    return engine


def wait_end(comparison: Comparison, seconds: float = 20) -> None:
    assert comparison.wait_ended(seconds), "the comparison does not end"


def settings(**flat: Any) -> CompareSettings:
    return CompareSettings.from_flat({"max_new_tokens": 20, **flat})


def found(service: ComparisonService, comparison_id: str) -> Comparison:
    comparison = service.find(comparison_id)
    assert comparison is not None
    return comparison


def test_lanes_run_in_order_with_the_same_settings_and_agree() -> None:
    with ready(Script(rate=None)) as engine:
        service = ComparisonService(engine)
        comparison = found(service, service.start("hi", settings(seed=7, modes=["ssd", "sd", "ar"])))
        wait_end(comparison)
    assert list(comparison.lanes) == ["ar", "sd", "ssd"]
    texts = {lane.text for lane in comparison.lanes.values()}
    assert len(texts) == 1
    update, _, _ = comparison.changes({})
    assert update["summary"]["same"]["answer"] is True
    assert [r["measured"] > 0 for r in update["summary"]["ratios"]] == [True] * 3
    assert comparison.settings["seed"] == 7


def test_a_reader_by_cursor_sees_every_token_once() -> None:
    with ready(Script(rate=2000.0)) as engine:
        service = ComparisonService(engine)
        comparison = found(service, service.start("hi", settings(max_new_tokens=200)))
        seen: dict[str, list[int]] = {"ar": [], "sd": [], "ssd": []}
        cursors: Any = {}
        active = True
        while active:
            update, cursors, _ = comparison.changes(cursors)
            active = update["active"]
            for mode, lane in update["lanes"].items():
                assert lane["first"] == len(seen[mode])
                seen[mode] += [row[0] for row in lane["tokens"]]
            time.sleep(0.01)
    assert seen == {mode: lane.token_ids for mode, lane in comparison.lanes.items()}
    assert len(seen["ssd"]) == 200


def test_followers_get_growing_snapshots_and_a_complete_last_one() -> None:
    with ready(Script(rate=400.0)) as engine:
        service = ComparisonService(engine)
        snapshots = list(service.follow(service.start("hi", settings()), interval=0.02))
    lengths = [len(s["lanes"]["ar"]["token_ids"]) for s in snapshots]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 2
    assert {lane["status"] for lane in snapshots[-1]["lanes"].values()} == {"finished"}
    assert snapshots[-1]["lanes"]["sd"]["figures"]["num_tokens"] == 20


def test_a_failing_lane_ends_alone_and_no_speed_is_held_against_it(log: StoredRunLog) -> None:
    with ready(Script(rate=None, fail_at={"sd": 7})) as engine:
        service = ComparisonService(engine, log)
        comparison_id = service.start("hi", settings())
        comparison = found(service, comparison_id)
        wait_end(comparison)
        after = found(service, service.start("again", settings(modes=["ar"])))
        wait_end(after)
    phases = {mode: lane.phase for mode, lane in comparison.lanes.items()}
    assert phases == {"ar": "finished", "sd": "failed", "ssd": "finished"}
    assert len(comparison.lanes["sd"].tokens) == 7
    assert "fail at token 7" in (comparison.lanes["sd"].error or "")
    update, _, _ = comparison.changes({})
    measured = {(r["fast"], r["slow"]): r["measured"] for r in update["summary"]["ratios"]}
    assert measured["sd", "ar"] is None
    assert measured["ssd", "sd"] is None
    assert measured["ssd", "ar"] > 0
    assert after.lanes["ar"].phase == "finished"
    stored = log.history("", None, "failed", None)["rows"]
    assert [row["id"] for row in stored] == [comparison_id]


def test_a_lane_that_lost_its_draft_has_no_ratio_live_or_stored(log: StoredRunLog) -> None:
    with ready(Script(rate=None, lost_draft=("ssd",))) as engine:
        service = ComparisonService(engine, log)
        comparison_id = service.start("hi", settings())
        live = found(service, comparison_id)
        wait_end(live)
        undisturbed = service.start("hi", settings(modes=["ar", "sd"]))
        wait_end(found(service, undisturbed))
    log.recorder.flush(5)
    stored = log.load(comparison_id)
    assert stored is not None
    for comparison in (live, stored):
        summary = comparison.changes({})[0]["summary"]
        whys = {(r["fast"], r["slow"]): (r["measured"] is None, r["why"]) for r in summary["ratios"]}
        lost = (True, "the draft was lost")
        assert whys == {("sd", "ar"): (False, None), ("ssd", "ar"): lost, ("ssd", "sd"): lost}
        assert (summary["per_device"]["ssd"]["rate"], summary["per_device"]["ssd"]["why"]) == (None, lost[1])
        assert summary["per_device"]["sd"]["rate"] > 0
        assert summary["same"]["answer"] is True
    rows = {row["id"]: row for row in log.history("", None, None, None)["rows"]}
    assert (rows[comparison_id]["speed_up"], rows[comparison_id]["no_speed_up"]) == (None, lost[1])
    assert rows[undisturbed]["no_speed_up"] is None


def test_a_difference_is_shown_with_its_place() -> None:
    with ready(Script(rate=None, differ_at={"ssd": 5})) as engine:
        service = ComparisonService(engine)
        comparison = found(service, service.start("hi", settings(rule="rejection", temperature=0.8)))
        wait_end(comparison)
    same = comparison.changes({})[0]["summary"]["same"]
    assert same["answer"] is False
    assert "AR and SSD differ at token 5" in same["text"]
    assert "rejection sampling" in same["text"]


@pytest.mark.parametrize(("one", "other", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1)])
def test_first_difference(one: list[int], other: list[int], place: int | None) -> None:
    assert first_difference(one, other) == place


def test_a_stop_ends_running_and_queued_lanes_within_a_round(log: StoredRunLog) -> None:
    with ready(Script(rate=100.0)) as engine:
        service = ComparisonService(engine, log)
        comparison_id = service.start("hi", settings(max_new_tokens=5000))
        comparison = found(service, comparison_id)
        while len(comparison.lanes["ar"].tokens) < 3:
            time.sleep(0.005)
        service.stop(comparison_id)
        wait_end(comparison, 1.0)
        rounds = engine.num_rounds_made
        time.sleep(0.1)
        assert engine.num_rounds_made == rounds
    assert {lane.phase for lane in comparison.lanes.values()} == {"stopped"}
    stored = log.load(comparison_id)
    assert stored is not None
    assert stored.lanes["ar"].token_ids == comparison.lanes["ar"].token_ids != []
    assert {lane.stop_reason for lane in stored.lanes.values()} == {"user"}


def test_stopping_an_unknown_comparison_does_nothing() -> None:
    with ready(Script(rate=None)) as engine:
        ComparisonService(engine).stop("nothing")


def test_a_stored_comparison_reads_as_it_was_live(log: StoredRunLog) -> None:
    with ready(Script(rate=None, notice="a notice")) as engine:
        service = ComparisonService(engine, log)
        comparison_id = service.start("hi", settings())
        live = found(service, comparison_id)
        wait_end(live)
    log.recorder.flush(5)
    stored = log.load(comparison_id)
    assert stored is not None
    live_update, stored_update = live.changes({})[0], stored.changes({})[0]
    assert stored_update == live_update
    rounds = live.lanes["ssd"].rounds
    assert live.lanes["ssd"].figures["num_fallbacks"] == sum(row[7] == "miss" for row in rounds) > 0
    assert stored.header()["settings"] == live.header()["settings"]
    assert log.load("unknown") is None


def test_comparisons_of_several_callers_never_mix() -> None:
    with ready(Script(rate=None)) as engine:
        service = ComparisonService(engine)
        ids: list[str] = []
        threads = [
            threading.Thread(target=lambda n=n: ids.append(service.start(f"p{n}", settings(max_new_tokens=10 + n))))
            for n in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for comparison_id in ids:
            comparison = found(service, comparison_id)
            wait_end(comparison)
            expected = 10 + int(comparison.prompt[1:])
            assert [len(lane.tokens) for lane in comparison.lanes.values()] == [expected] * 3


def test_too_many_waiting_comparisons_are_refused() -> None:
    with ready(Script(rate=5.0)) as engine:
        service = ComparisonService(engine)
        ids = [service.start("hi", settings()) for _ in range(service.MAX_ACTIVE)]
        with pytest.raises(InvalidRequest, match="16 comparisons are waiting"):
            service.start("one too many", settings())
        assert service.num_ahead(found(service, ids[3])) == 3
        for comparison_id in reversed(ids):
            service.stop(comparison_id)


def test_nothing_starts_while_the_models_load_or_after_they_failed(log: StoredRunLog) -> None:
    engine = EchoEngine(Script(load_seconds=0.2, load_error="no weights in /nowhere"))
    with engine:
        service = ComparisonService(engine, log)
        time.sleep(0.05)
        with pytest.raises(EngineUnavailable, match=r"still loading \(Reading the target's weights"):
            service.start("hi", settings())
        while engine.status.state == "loading":
            time.sleep(0.01)
        with pytest.raises(EngineUnavailable, match="no weights in /nowhere"):
            service.start("hi", settings())
    assert log.history("", None, None, None)["rows"] == []


def test_an_engine_that_refuses_a_run_fails_that_lane() -> None:
    class Refusing(EchoEngine):
        def submit(self, run_id: str, request: Any, on_event: Any) -> None:
            if request.mode == "sd":
                raise EngineUnavailable("the engine process is gone")
            super().submit(run_id, request, on_event)

    with Refusing(Script(rate=None)) as engine:
        engine.wait_ready(5)
        service = ComparisonService(engine)
        comparison = found(service, service.start("hi", settings()))
        wait_end(comparison)
    assert comparison.lanes["sd"].phase == "failed"
    assert comparison.lanes["sd"].error == "the engine process is gone"
    assert comparison.lanes["ssd"].phase == "finished"


def test_a_log_in_trouble_never_stops_a_stream(tmp_path: Path) -> None:
    with Recorder(tmp_path / "log.db") as recorder, ready(Script(rate=None)) as engine:
        recorder.close()
        service = ComparisonService(engine, StoredRunLog(recorder))
        comparison = found(service, service.start("hi", settings()))
        wait_end(comparison)
    assert {lane.phase for lane in comparison.lanes.values()} == {"finished"}


def test_live_speed_counts_committed_tokens_not_updates() -> None:
    """Case 16: eight tokens in one commit are eight tokens; the first commit only starts the clock."""
    lane = LaneState("r", "sd")
    for index in range(24):
        at = 1.0 + (index // 8) * 0.5
        token = TokenEvent(
            run_id="r", index=index, token_id=1, text="x", time=at, round_index=0, place=0, origin="draft"
        )
        lane.apply(token)
    assert lane.figures["decode_tokens_per_second"] == pytest.approx(16.0)
    assert lane.figures["time_to_first_token"] == 1.0
    assert lane.figures["draft_acceptance_rate"] is None


def test_only_misses_that_a_fallback_served_count_as_fallbacks() -> None:
    """Neither the first round, which has nothing to miss, nor a miss that nothing speculated for."""
    lane = LaneState("r", "ssd")
    outcomes: list[tuple[CacheOutcome, FallbackKind | None]] = [
        ("compulsory", "neural"), ("hit", None), ("miss", "none"), ("miss", "ngram"), ("miss", "neural"),
    ]  # fmt: skip
    for index, (cache, fallback) in enumerate(outcomes):
        event = RoundEvent(
            run_id="r", index=index, drafted=4, accepted=0, bonus_token_id=1, start=0.0, verify_ms=1.0, draft_ms=1.0,
            wait_ms=0.0, cache=cache, fallback=fallback, num_committed=1,
        )  # fmt: skip
        lane.apply(event)
    assert lane.figures["num_fallbacks"] == 2
