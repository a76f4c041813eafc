"""Recording: what goes in comes out, from any thread, and a row that cannot be stored does not take others along."""

import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_samples import (
    count_rows,
    make_events,
    make_info,
    make_request,
    make_round,
    query,
    record_all,
    record_comparison,
    start,
)

from saguaro_core.events import (
    Alternative,
    Notice,
    PreparedOutcome,
    RoundEvent,
    RunFinished,
    RunStarted,
    SpanEvent,
    TokenEvent,
)
from saguaro_core.run_figures import RunFigures
from storage import LogReader, Recorder, RecorderLimits

MARKUP = (
    "<b>x</b> <think>y</think> <hello> if a<b && c>d <style>*{}</style> ```py\n$x_1$ "
    "\r\n\t \"q\" 's' %s {0} &lt; \0 日本 🙂"
)


def test_run_is_read_back_as_it_was_emitted(tmp_path: Path) -> None:
    request = make_request("What is a cactus?")
    events = make_events("r1")
    with Recorder(tmp_path / "log.db") as recorder:
        recorder.start_comparison("c1", request.messages, {"modes": ["ssd"]}, title="Cacti", created_at=1_764_444_000.5)
        recorder.start_run("r1", "c1", request, make_info(), queued_at=1_764_444_001.0)
        record_all(recorder, events)
        assert recorder.wait_saved("r1", 10)
        assert recorder.problem is None
    detail = LogReader(tmp_path / "log.db").run("r1")
    finished = events[-1]
    assert isinstance(finished, RunFinished)
    assert detail.tokens == tuple(event for event in events if isinstance(event, TokenEvent))
    assert detail.rounds == tuple(event for event in events if isinstance(event, RoundEvent))
    assert detail.spans == tuple(event for event in events if isinstance(event, SpanEvent))
    assert detail.notices == tuple(event for event in events if isinstance(event, Notice))
    run = detail.run
    assert (run.status, run.stop_reason, run.error, run.rows_complete) == ("finished", "eos", None, True)
    assert run.answer == finished.text
    assert run.answer_token_ids == finished.token_ids
    assert run.figures == finished.figures
    assert run.settings == request.settings() | {"sampling": {**request.settings()["sampling"], "stop": []}} | {
        "speculation": {**request.settings()["speculation"], "fan_out_list": []}
    }
    assert (run.prompt, run.prompt_token_ids) == ("<|im_start|>user\nhi", (1, 9))
    assert (run.queued_at, run.started_at) == ("2025-11-29T19:20:01.000000Z", "2025-11-29T19:27:24.125000Z")
    assert run.engine["versions"] == {"torch": "2.13.0", "transformers": "5.24.0"}
    comparison = LogReader(tmp_path / "log.db").comparison("c1")
    assert comparison.messages == request.messages
    assert (comparison.title, comparison.prompt, comparison.settings) == (
        "Cacti",
        "What is a cactus?",
        {"modes": ["ssd"]},
    )
    assert comparison.runs == (run,)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
numbers = st.floats(0, 1e6)
probabilities = st.none() | st.floats(0, 1)
ids = st.integers(0, 2**31)


RowEvent = TokenEvent | RoundEvent | SpanEvent | Notice


@st.composite
def run_events(draw: st.DrawFn) -> list[RowEvent]:
    tokens = [
        TokenEvent(
            run_id="r",
            index=index,
            token_id=draw(ids),
            text=draw(texts),
            time=draw(numbers),
            round_index=draw(st.integers(0, 9)),
            place=draw(st.integers(0, 16)),
            origin=draw(st.sampled_from(["target", "draft", "cache_hit", "fallback", "bonus"])),
            p=draw(probabilities),
            q=draw(probabilities),
            alternatives=tuple(
                draw(st.lists(st.builds(Alternative, token_id=ids, text=texts, p=st.floats(0, 1)), max_size=3))
            ),
        )
        for index in range(draw(st.integers(0, 4)))
    ]
    prepared = st.builds(PreparedOutcome, accepted=st.integers(0, 16), token_ids=st.lists(ids, max_size=4).map(tuple))
    rounds = [
        RoundEvent(
            run_id="r",
            index=index,
            drafted=draw(st.integers(0, 16)),
            accepted=draw(st.integers(0, 16)),
            bonus_token_id=draw(ids),
            start=draw(numbers),
            verify_ms=draw(numbers),
            draft_ms=draw(numbers),
            wait_ms=draw(numbers),
            cache=draw(st.sampled_from([None, "hit", "miss", "compulsory"])),
            fallback=draw(st.sampled_from([None, "neural", "ngram", "none"])),
            fan_out=tuple(draw(st.lists(st.integers(0, 64), max_size=17))),
            prepared=tuple(draw(st.lists(prepared, max_size=3))),
            num_committed=draw(st.integers(0, 17)),
        )
        for index in range(draw(st.integers(0, 3)))
    ]
    spans = draw(
        st.lists(
            st.builds(
                SpanEvent,
                run_id=st.just("r"),
                lane=st.sampled_from(["target", "draft"]),
                kind=st.sampled_from(["prefill", "verify", "build", "step", "fallback", "wait"]),
                start=numbers,
                end=numbers,
                round_index=st.none() | st.integers(0, 9),
            ),
            max_size=3,
        )
    )
    notices = draw(st.lists(st.builds(Notice, run_id=st.just("r"), message=texts, time=numbers), max_size=2))
    unordered: list[RowEvent] = draw(st.permutations([*spans, *notices]))
    return [*unordered, *tokens, *rounds]


@settings(derandomize=True, max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=run_events(), answer=texts, prompt=texts.filter(str.strip))
def test_rows_in_are_rows_out(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[RowEvent],
    answer: str,
    prompt: str,
) -> None:
    path = tmp_path_factory.mktemp("rows") / "log.db"
    with Recorder(path, limits=RecorderLimits(commit_interval=0.0)) as recorder:
        start(recorder, "c", ["r"], make_request(prompt))
        record_all(recorder, events)
        figures = RunFigures(num_tokens=len(events))
        recorder.record(
            RunFinished(
                run_id="r", status="stopped", stop_reason="user", time=1, text=answer, token_ids=(), figures=figures
            )
        )
        assert recorder.wait_saved("r", 10)
        detail = LogReader(path).run("r")
        assert LogReader(path).comparison("c").prompt == prompt
    assert detail.run.answer == answer
    assert detail.run.figures == figures
    assert list(detail.tokens) == [event for event in events if isinstance(event, TokenEvent)]
    assert list(detail.rounds) == [event for event in events if isinstance(event, RoundEvent)]
    assert list(detail.spans) == [event for event in events if isinstance(event, SpanEvent)]
    assert list(detail.notices) == [event for event in events if isinstance(event, Notice)]


def test_text_is_stored_raw(tmp_path: Path) -> None:
    with Recorder(tmp_path / "log.db") as recorder:
        start(recorder, "c", ["r"], make_request(MARKUP))
        record_all(recorder, make_events("r", text=MARKUP))
        recorder.flush(10)
        token = make_round("r", 99)[2]
        assert isinstance(token, TokenEvent)
        assert recorder.wait_saved("r", 10)
    assert query(tmp_path / "log.db", "SELECT answer FROM runs") == [(MARKUP,)]
    assert query(tmp_path / "log.db", "SELECT prompt FROM comparisons") == [(MARKUP,)]
    assert LogReader(tmp_path / "log.db").comparison("c").messages[0].content == MARKUP


def test_what_sqlite_cannot_hold_is_replaced_and_costs_no_row(tmp_path: Path) -> None:
    half = "half a pair \ud83d here"
    with Recorder(tmp_path / "log.db") as recorder:
        start(recorder, "c", ["r"], make_request(half))
        token = make_round("r", 0)[2]
        assert isinstance(token, TokenEvent)
        recorder.record(replace(token, text=half, p=float("nan"), q=float("inf")))
        record_all(recorder, [event for event in make_events("r", 0, text=half) if isinstance(event, RunFinished)])
        assert recorder.wait_saved("r", 10)
        assert recorder.problem is None
    (stored,) = LogReader(tmp_path / "log.db").run("r").tokens
    assert (stored.text, stored.p, stored.q) == ("half a pair \ufffd here", None, None)
    assert query(tmp_path / "log.db", "SELECT min(json_valid(messages)) FROM comparisons") == [(1,)]


@pytest.mark.parametrize(("status", "reason", "error"), [("stopped", "user", None), ("failed", "error", "boom <x>")])
def test_cut_run_keeps_its_partial_text_and_rows(tmp_path: Path, status: str, reason: str, error: str | None) -> None:
    with Recorder(tmp_path / "log.db") as recorder:
        start(recorder, "c", ["r"], make_request())
        record_all(recorder, make_events("r", 2, status=status, stop_reason=reason, error=error))  # type: ignore[arg-type]
        assert recorder.wait_saved("r", 10)
    detail = LogReader(tmp_path / "log.db").run("r")
    assert (detail.run.status, detail.run.stop_reason, detail.run.error) == (status, reason, error)
    assert detail.run.answer == " w0 w1 w2 w3"
    assert (len(detail.tokens), len(detail.rounds)) == (4, 2)


def test_ids_and_counts_follow_the_tokens_when_a_stop_string_cuts_the_text(tmp_path: Path) -> None:
    # The stop string's own tokens are in the ids and carry no text.
    events = make_events("r", 2, text=" w0 w1", stop_reason="stop")
    events = [replace(e, text="") if isinstance(e, TokenEvent) and e.index >= 2 else e for e in events]
    with Recorder(tmp_path / "log.db") as recorder:
        start(recorder, "c", ["r"], make_request())
        record_all(recorder, events)
        assert recorder.wait_saved("r", 10)
    detail = LogReader(tmp_path / "log.db").run("r")
    assert detail.run.answer == "".join(token.text for token in detail.tokens) == " w0 w1"
    assert detail.run.answer_token_ids == tuple(token.token_id for token in detail.tokens) == (100, 101, 102, 103)
    assert detail.run.num_tokens == 4


def test_events_are_committed_while_the_run_goes(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    with Recorder(path) as recorder:
        start(recorder, "c", ["r"], make_request())
        record_all(recorder, make_events("r", 2)[:-1])
        deadline = time.monotonic() + 5
        while count_rows(path)["rounds"] < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert count_rows(path)["tokens"] == 4
        assert LogReader(path).run("r").run.status == "running"


def test_closing_marks_unfinished_runs(tmp_path: Path) -> None:
    with Recorder(tmp_path / "log.db") as recorder:
        start(recorder, "c", ["r"], make_request())
        record_all(recorder, make_events("r", 2)[:-1])
    assert [file.name for file in tmp_path.iterdir()] == ["log.db"]
    run = LogReader(tmp_path / "log.db").run("r").run
    assert (run.status, run.answer) == ("interrupted", " w0 w1 w2 w3")
    assert run.figures is not None
    assert (run.figures.num_tokens, run.figures.cache_hit_rate) == (4, 1.0)


def test_events_of_unknown_runs_and_after_the_end_are_ignored(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "log.db")
    record_all(recorder, make_events("stranger"))
    record_comparison(recorder, "c")
    record_all(recorder, make_events("c-ssd", 9))
    recorder.close()
    recorder.close()
    start(recorder, "late", ["late-run"], make_request())
    record_all(recorder, make_events("late-run"))
    assert not recorder.wait_saved("late-run", 5)
    assert recorder.problem is None
    assert count_rows(tmp_path / "log.db") == {
        "comparisons": 1, "runs": 1, "rounds": 3, "tokens": 6, "spans": 7, "notices": 1
    }  # fmt: skip


def test_twelve_runs_from_twelve_threads_are_each_stored_once_while_a_reader_polls(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    recorder, reader, errors = Recorder(path), LogReader(path), []
    has_ended = threading.Event()

    def run_lane(tab: int, lane: int) -> None:
        run_id = f"run-{tab}-{lane}"
        recorder.start_run(run_id, f"tab-{tab}", make_request(), make_info())
        for event in make_events(run_id, 40):
            recorder.record(event)
        if not recorder.wait_saved(run_id, 20):
            errors.append(f"{run_id} was not saved: {recorder.problem}")

    def poll() -> None:
        while not has_ended.is_set():
            for entry in reader.history().entries:
                for run in entry.runs:
                    detail = reader.run(run.id)
                    if run.status == "finished" and len(detail.tokens) != 80:
                        errors.append(f"{run.id} reads finished with {len(detail.tokens)} tokens")

    poller = threading.Thread(target=poll)
    lanes = [threading.Thread(target=run_lane, args=(tab, lane)) for tab in range(4) for lane in range(3)]
    for tab in range(4):
        recorder.start_comparison(f"tab-{tab}", make_request().messages, {})
    for thread in [poller, *lanes]:
        thread.start()
    for thread in lanes:
        thread.join()
    has_ended.set()
    poller.join()
    # Closed by another thread than the one that opened it.
    closer = threading.Thread(target=recorder.close)
    closer.start()
    closer.join()
    assert errors == []
    assert recorder.problem is None
    assert count_rows(path) == {
        "comparisons": 4, "runs": 12, "rounds": 480, "tokens": 960, "spans": 12 * 81, "notices": 12
    }  # fmt: skip
    assert query(path, "SELECT count(DISTINCT id) FROM runs WHERE status = 'finished'") == [(12,)]


def test_row_that_is_refused_is_shown_and_leaves_its_neighbours(tmp_path: Path) -> None:
    events = make_events("r")
    assert isinstance(events[6], TokenEvent)
    events[6] = replace(events[6], token_id="no number")  # type: ignore[arg-type]
    with Recorder(tmp_path / "log.db") as recorder:
        start(recorder, "c", ["r"], make_request())
        record_all(recorder, events)
        assert not recorder.wait_saved("r", 10)
        assert "cannot store TEXT value in INTEGER column" in str(recorder.problem)
        record_comparison(recorder, "next")
        assert recorder.problem is None
    detail = LogReader(tmp_path / "log.db").run("r")
    assert (len(detail.tokens), len(detail.rounds), detail.run.rows_complete) == (5, 3, False)
    assert detail.run.status == "finished"


def test_run_of_an_unknown_comparison_is_a_visible_loss(tmp_path: Path) -> None:
    with Recorder(tmp_path / "log.db") as recorder:
        recorder.start_run("r", "nowhere", make_request(), make_info())
        record_all(recorder, make_events("r"))
        assert not recorder.wait_saved("r", 10)
        assert "FOREIGN KEY" in str(recorder.problem) or "no longer in the log" in str(recorder.problem)
    assert set(count_rows(tmp_path / "log.db").values()) == {0}


def test_deleting_takes_all_rows_and_what_a_running_run_still_emits_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    with Recorder(path) as recorder:
        record_comparison(recorder, "kept", "Keep this prickly text.")
        start(recorder, "gone", ["r"], make_request("Delete this prickly text."))
        events = make_events("r")
        record_all(recorder, events[:10])
        assert recorder.delete_comparison("gone")
        record_all(recorder, events[10:])
        assert recorder.flush(10)
        assert recorder.problem is None
        assert recorder.delete_comparison("never there")
    assert count_rows(path) == {"comparisons": 1, "runs": 1, "rounds": 3, "tokens": 6, "spans": 7, "notices": 1}
    assert [entry.id for entry in LogReader(path).history("prickly").entries] == ["kept"]


def test_transaction_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure between two rows of a batch leaves neither; the next attempt stores both once."""
    from storage import writer

    path = tmp_path / "log.db"
    seen: list[dict[str, int]] = []
    plain_insert = writer._insert

    def failing_insert(db: object, table: str, row: dict[str, object]) -> None:
        if table == "rounds" and len(seen) < 2:
            seen.append(count_rows(path))
            raise sqlite3.OperationalError("disk I/O error")
        plain_insert(db, table, row)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "_insert", failing_insert)
    with Recorder(path, limits=RecorderLimits(commit_interval=0.3, retry_interval=0.05)) as recorder:
        start(recorder, "c", ["r"], make_request())
        record_all(recorder, make_events("r"))
        assert recorder.wait_saved("r", 10)
        assert recorder.problem is None
    assert [rows["tokens"] for rows in seen] == [0, 0]
    assert count_rows(path) == {"comparisons": 1, "runs": 1, "rounds": 3, "tokens": 6, "spans": 7, "notices": 1}


def test_started_run_keeps_its_row_when_only_started(tmp_path: Path) -> None:
    with Recorder(tmp_path / "log.db") as recorder:
        start(recorder, "c", ["queued", "begun"], make_request())
        recorder.record(RunStarted(run_id="begun", started_at=0.0, prompt="", prompt_token_ids=()))
        assert recorder.flush(10)
        queued, begun = LogReader(tmp_path / "log.db").comparison("c").runs
    assert (queued.status, queued.started_at) == ("running", None)
    assert (begun.status, begun.started_at) == ("running", "1970-01-01T00:00:00.000000Z")
