"""The benchmark over a scripted engine: what is run, how figures are reduced, what is said, and the exit status."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from saguaro_core.bench import main
from saguaro_core.config import EngineConfig, GenerationRequest, Mode
from saguaro_core.errors import ModelError
from saguaro_core.events import (
    CacheOutcome,
    Event,
    Notice,
    RoundEvent,
    RunFinished,
    RunStarted,
    SpanEvent,
    SpanKind,
    TokenEvent,
)
from saguaro_core.figures import FiguresAccumulator
from saguaro_core.prompts import KINDS, PROMPTS, WARM_UP
from saguaro_core.status import EngineInfo, EngineStatus, ModelInfo

TARGET = ModelInfo(
    name="scripted",
    revision="1",
    dtype="float32",
    device="cpu:0",
    num_parameters=8,
    vocabulary_size=8,
    context_length=64,
    memory_bytes=32,
)
INFO = EngineInfo(
    target=TARGET,
    draft=replace(TARGET, name="scripted-draft", device="cpu:1"),
    draft_error=None,
    context_length=64,
    num_devices=2,
    hardware="a scripted machine",
    versions={"torch": "none"},
)
# Per mode: tokens per round, verify, and the span kind and length that the round waits for; times in seconds.
PACE: dict[Mode, tuple[int, float, SpanKind, float]] = {
    "ar": (1, 0.020, "wait", 0.0),
    "sd": (2, 0.025, "step", 0.025),
    "ssd": (2, 0.025, "fallback", 0.0),
}
SPEED = {"ar": 50.0, "sd": 40.0, "ssd": 80.0}


@dataclass
class ScriptedEngine:
    """Answers every request with tokens 0, 1, 2... in rounds of fixed length; knobs make it misbehave."""

    info: EngineInfo = INFO
    load_error: str | None = None
    fail_on: str | None = None
    hang: bool = False
    differ_in: Mode | None = None
    notice: str | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    is_closed: bool = False
    config: EngineConfig | None = None

    def factory(self, config: EngineConfig, on_status: Callable[[EngineStatus], None]) -> "ScriptedEngine":
        self.config = config
        on_status(EngineStatus(state="loading", message="Loading the script"))
        return self

    def start(self) -> None:
        """Nothing to start."""

    def wait_ready(self, timeout: float | None = None) -> EngineInfo:
        if self.load_error:
            raise ModelError(self.load_error)
        return self.info

    def stop(self, run_id: str) -> None:
        self.stopped.append(run_id)

    def close(self) -> None:
        self.is_closed = True

    def submit(self, run_id: str, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        self.requests.append(request)
        if self.hang:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            return
        threading.Thread(target=self._decode, args=(run_id, request, on_event)).start()

    def _decode(self, run_id: str, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        accumulator = FiguresAccumulator(request.mode, self.info.num_devices)
        events = list(self._events(run_id, request))
        for event in events:
            accumulator.add(event)
            on_event(event)
        token_ids = tuple(event.token_id for event in events if isinstance(event, TokenEvent))
        elapsed = max((event.time for event in events if isinstance(event, TokenEvent)), default=0.0)
        is_failure = self.fail_on == request.mode and request.messages[0].content != WARM_UP.text
        on_event(
            RunFinished(
                run_id=run_id,
                status="failed" if is_failure else "finished",
                stop_reason="error" if is_failure else "length",
                time=elapsed,
                text="",
                token_ids=token_ids,
                figures=accumulator.figures(elapsed),
                error="the script says so" if is_failure else None,
            )
        )

    def _events(self, run_id: str, request: GenerationRequest) -> list[Event]:
        per_round, verify, kind, draft_time = PACE[request.mode]
        events: list[Event] = [RunStarted(run_id=run_id, started_at=0.0, prompt="", prompt_token_ids=())]
        if self.notice:
            events.append(Notice(run_id=run_id, message=self.notice, time=0.0))
        now, num_tokens, cap = 1.0, 0, request.sampling.max_new_tokens
        for index in range(cap):
            if num_tokens == cap:
                break
            count = min(per_round, cap - num_tokens)
            events += self._spans(run_id, request.mode, index, now, kind)
            now += draft_time + verify
            events.append(_round(run_id, request.mode, index, count, verify, draft_time))
            for place in range(count):
                token_id = num_tokens + (10 if request.mode == self.differ_in and num_tokens == 3 else 0)
                events.append(_token(run_id, num_tokens, token_id, now, index, place))
                num_tokens += 1
        return events

    def _spans(self, run_id: str, mode: Mode, index: int, now: float, kind: SpanKind) -> list[Event]:
        _, verify, _, draft_time = PACE[mode]
        middle, end = now + draft_time, now + draft_time + verify
        spans: list[Event] = [
            SpanEvent(run_id=run_id, lane="target", kind="verify", start=middle, end=end, round_index=index)
        ]
        if mode != "ar":
            spans.append(SpanEvent(run_id=run_id, lane="draft", kind=kind, start=now, end=middle, round_index=index))
        if mode == "ssd":
            spans.append(SpanEvent(run_id=run_id, lane="draft", kind="build", start=now, end=end, round_index=index))
        return spans


def _round(run_id: str, mode: Mode, index: int, count: int, verify: float, wait: float) -> RoundEvent:
    cache: CacheOutcome = "hit" if index else "compulsory"
    return RoundEvent(
        run_id=run_id,
        index=index,
        drafted=count - 1,
        accepted=count - 1,
        bonus_token_id=0,
        start=0.0,
        verify_ms=1000 * verify,
        draft_ms=0.0,
        wait_ms=1000 * wait,
        cache=cache if mode == "ssd" else None,
        num_committed=count,
    )


def _token(run_id: str, index: int, token_id: int, time: float, round_index: int, place: int) -> TokenEvent:
    return TokenEvent(
        run_id=run_id,
        index=index,
        token_id=token_id,
        text="",
        time=time,
        round_index=round_index,
        place=place,
        origin="bonus",
    )


@dataclass(frozen=True)
class Outcome:
    """What a call of the command line left behind."""

    status: int
    out: str
    err: str
    data: dict[str, Any]


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def call(engine: ScriptedEngine, *arguments: str) -> Outcome:
        file = tmp_path / "out.json"
        try:
            status = main([*arguments, "--json", str(file)], engine.factory)
        except SystemExit as error:
            status = int(str(error.code))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        data = json.loads(file.read_text()) if file.exists() else {}
        return Outcome(status, captured.out, captured.err, data)

    return call


def row(text: str, label: str) -> list[str]:
    """The cells of one line of the table."""
    line = next(line for line in text.splitlines() if line.startswith(label))
    return line.removeprefix(label).split()


def modes_and_prompts(requests: Sequence[GenerationRequest]) -> list[tuple[Mode, str]]:
    return [(request.mode, request.messages[0].content) for request in requests]


def test_every_prompt_runs_in_all_modes_in_turn_after_one_warm_up_each(bench: Callable[..., Outcome]) -> None:
    engine = ScriptedEngine()
    outcome = bench(engine, "--prompts", "2", "--max-new-tokens", "5")
    assert outcome.status == 0
    texts = [WARM_UP.text, PROMPTS[0].text, PROMPTS[1].text]
    expected = [(mode, text) for text in texts for mode in ("ar", "sd", "ssd")]
    assert modes_and_prompts(engine.requests) == expected
    assert len(outcome.data["runs"]) == 6
    assert engine.is_closed


def test_repeats_run_the_whole_plan_again(bench: Callable[..., Outcome]) -> None:
    engine = ScriptedEngine()
    outcome = bench(engine, "--prompts", "2", "--max-new-tokens", "5", "--modes", "ar,ssd", "--repeats", "3")
    assert len(engine.requests) == 2 + 2 * 2 * 3
    assert [run["repeat"] for run in outcome.data["runs"]] == [0] * 4 + [1] * 4 + [2] * 4
    assert outcome.data["modes"]["ar"]["num_runs"] == 6


def test_json_has_the_documented_keys_and_figures(bench: Callable[..., Outcome]) -> None:
    data = bench(ScriptedEngine(), "--prompts", "3", "--max-new-tokens", "21").data
    assert set(data["modes"]) == {"ar", "sd", "ssd"}
    for mode, speed in SPEED.items():
        assert data["modes"][mode]["decode_tokens_per_second"] == pytest.approx(speed, rel=0.08)
    ratios = data["ratios"]
    assert set(ratios) == {"ssd_over_ar", "ssd_over_sd", "sd_over_ar"}
    assert ratios["ssd_over_sd"] == pytest.approx(2.0)
    assert ratios["ssd_over_ar"] == pytest.approx(ratios["ssd_over_sd"] * ratios["sd_over_ar"])
    assert data["same_tokens"] is True
    assert data["differences"] == data["notes"] == []
    assert data["hardware"] == INFO.hardware
    assert data["settings"]["sampling"]["max_new_tokens"] == 21
    assert data["runs"][0]["figures"]["num_tokens"] == 21


def test_prediction_agrees_with_a_run_that_follows_the_model(bench: Callable[..., Outcome]) -> None:
    data = bench(ScriptedEngine(), "--prompts", "1", "--max-new-tokens", "41").data
    for name, ratio in data["ratios"].items():
        assert data["predicted_ratios"][name] == pytest.approx(ratio, rel=0.05)


def test_the_table_shows_every_figure(bench: Callable[..., Outcome]) -> None:
    out = bench(ScriptedEngine(), "--prompts", "2", "--max-new-tokens", "20").out
    assert row(out, " ") == ["AR", "SD", "SSD"]
    assert row(out, "acceptance") == ["n/a", "100%", "100%"]
    assert row(out, "cache hit rate") == ["n/a", "n/a", "100%"]
    assert row(out, "tokens per round") == ["n/a", "2.00", "2.00"]
    assert row(out, "verify, mean ms") == ["20.0", "25.0", "25.0"]
    assert row(out, "draft step, mean ms") == ["n/a", "25.0", "n/a"]
    assert row(out, "cache build, mean ms") == ["n/a", "n/a", "25.0"]
    assert row(out, "wait for draft, mean ms") == ["n/a", "25.0", "0.0"]
    assert row(out, "build inside verify") == ["n/a", "n/a", "100%"]
    assert row(out, "ratio to AR [quartiles]")[0] == "1.00"
    assert row(out, "ratio to SD [quartiles]")[:2] == ["1.00", "2.00"]
    assert "same tokens: yes" in out


def test_different_tokens_are_reported_with_their_place_and_do_not_fail(bench: Callable[..., Outcome]) -> None:
    outcome = bench(ScriptedEngine(differ_in="ssd"), "--prompts", "2", "--max-new-tokens", "6")
    assert outcome.status == 0
    assert outcome.data["same_tokens"] is False
    assert outcome.data["differences"][1] == {
        "prompt": 1,
        "repeat": 0,
        "modes": ["ar", "ssd"],
        "index": 3,
        "token_ids": [3, 13],
    }
    assert "same tokens: no, 2 answers differ" in outcome.out
    assert "prompt 2, repeat 1, at index 3: ar has token 3, ssd has token 13" in outcome.out


def test_one_mode_has_no_ratio_and_nothing_to_compare(bench: Callable[..., Outcome]) -> None:
    outcome = bench(ScriptedEngine(), "--modes", "ssd", "--prompts", "1", "--max-new-tokens", "5")
    assert outcome.data["ratios"] == {"ssd_over_ar": None, "ssd_over_sd": None, "sd_over_ar": None}
    assert outcome.data["same_tokens"] is None
    assert "ratio" not in outcome.out
    assert "same tokens: n/a" in outcome.out


def test_answers_of_one_token_have_no_speed(bench: Callable[..., Outcome]) -> None:
    outcome = bench(ScriptedEngine(), "--prompts", "1", "--max-new-tokens", "1")
    assert outcome.status == 0
    assert row(outcome.out, "tokens/s, median") == ["n/a"] * 3
    assert row(outcome.out, "ratio to AR [quartiles]") == ["1.00", "n/a", "n/a"]
    assert outcome.data["ratios"]["ssd_over_ar"] is None
    assert outcome.data["notes"] == []


def test_notices_of_the_engine_are_shown(bench: Callable[..., Outcome]) -> None:
    outcome = bench(ScriptedEngine(notice="The draft was lost."), "--prompts", "1", "--max-new-tokens", "5")
    assert "prompt 1, ssd: The draft was lost." in outcome.out
    assert "prompt 1, ssd: The draft was lost." in outcome.data["notes"]


def test_speculation_that_never_ran_is_said(bench: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACE, "sd", (1, 0.025, "step", 0.0))
    outcome = bench(ScriptedEngine(), "--modes", "ar,sd", "--prompts", "1", "--max-new-tokens", "5")
    assert "prompt 1, sd: nothing was drafted" in outcome.out


def test_a_failed_run_ends_the_benchmark_with_its_reason(bench: Callable[..., Outcome]) -> None:
    engine = ScriptedEngine(fail_on="sd")
    outcome = bench(engine, "--prompts", "2", "--max-new-tokens", "5")
    assert outcome.status == 1
    assert "prompt 1 in mode sd failed: the script says so" in outcome.err
    assert outcome.out == ""
    assert outcome.data == {}
    assert engine.is_closed


def test_a_model_that_does_not_load_ends_with_its_reason(bench: Callable[..., Outcome]) -> None:
    engine = ScriptedEngine(load_error="no folder named nowhere")
    outcome = bench(engine, "--target", "nowhere")
    assert outcome.status == 1
    assert "no folder named nowhere" in outcome.err
    assert engine.is_closed


def test_without_a_draft_only_ar_runs(bench: Callable[..., Outcome]) -> None:
    alone = replace(INFO, draft=None, draft_error="its token map differs at id 5", num_devices=1)
    outcome = bench(ScriptedEngine(info=alone), "--prompts", "1")
    assert outcome.status == 1
    assert "its token map differs at id 5" in outcome.err
    assert bench(ScriptedEngine(info=alone), "--prompts", "1", "--modes", "ar", "--max-new-tokens", "5").status == 0


def test_an_interrupt_stops_the_run_and_closes_the_engine(bench: Callable[..., Outcome]) -> None:
    engine = ScriptedEngine(hang=True)
    outcome = bench(engine, "--prompts", "1")
    assert outcome.status == 130
    assert len(engine.stopped) == 1
    assert engine.is_closed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "ar,foo"], "modes is 'ar,foo'"),
        (["--modes", "ar,ar"], "modes is 'ar,ar'"),
        (["--modes", ""], "modes is ''"),
        (["--prompts", "0"], "prompts is 0"),
        (["--prompts", "33"], "prompts is 33"),
        (["--prompts", "many"], "'many'"),
        (["--repeats", "0"], "repeats is 0"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--max-new-tokens", "-5"], "max_new_tokens is -5"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "2.5"], "temperature is 2.5"),
        (["--seed", "-1"], "seed is -1"),
        (["--lookahead", "0"], "lookahead is 0"),
        (["--lookahead", "17"], "lookahead is 17"),
        (["--budget", "65"], "budget is 65"),
        (["--fan-out", "round"], "fan_out is 'round'"),
        (["--fan-out", "4,,3"], "fan_out is '4,,3'"),
        (["--fan-out", "4,3"], r"fan_out_list is (4, 3)"),
        (["--fallback", "slow"], "fallback is 'slow'"),
        (["--rule", "luck"], "rule is 'luck'"),
        (["--placement", "gpu"], "placement is 'gpu'"),
        (["--target", ""], "target is ''"),
        (["--peers"], "--peers"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(
    bench: Callable[..., Outcome], arguments: list[str], message: str
) -> None:
    engine = ScriptedEngine()
    outcome = bench(engine, *arguments)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.out == ""
    assert engine.config is None


def test_a_json_file_in_no_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    with pytest.raises(SystemExit) as error:
        main(["--json", str(tmp_path / "missing" / "out.json")], engine.factory)
    assert error.value.code == 2
    assert engine.config is None


def test_settings_reach_the_engine(bench: Callable[..., Outcome]) -> None:
    engine = ScriptedEngine()
    options = "--prompts 1 --max-new-tokens 5 --temperature 0.8 --seed 7 --lookahead 2 --fan-out 4,3,5 --fallback fast"
    bench(
        engine, *options.split(), "--rule", "rejection", "--target", "t", "--draft", "d", "--placement", "target=cpu:1"
    )
    request = engine.requests[-1]
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.max_new_tokens) == (0.8, 7, 5)
    assert (request.speculation.lookahead, request.speculation.fan_out_list) == (2, (4, 3, 5))
    assert (request.speculation.fallback, request.speculation.rule) == ("fast", "rejection")
    assert engine.config is not None
    assert (engine.config.target, engine.config.draft, engine.config.placement.target) == ("t", "d", "cpu:1")


def test_quick_is_one_prompt_of_each_kind_and_given_sizes_win(bench: Callable[..., Outcome]) -> None:
    data = bench(ScriptedEngine(), "--quick", "--modes", "ar").data
    assert [run["kind"] for run in data["runs"]] == list(KINDS)
    assert data["settings"]["sampling"]["max_new_tokens"] == 64
    data = bench(ScriptedEngine(), "--quick", "--modes", "ar", "--prompts", "2", "--max-new-tokens", "9").data
    assert data["settings"]["num_prompts"] == 2
    assert data["settings"]["sampling"]["max_new_tokens"] == 9


def test_there_are_eight_different_prompts_of_each_kind() -> None:
    assert Counter(prompt.kind for prompt in PROMPTS) == dict.fromkeys(KINDS, 8)
    texts = {prompt.text for prompt in PROMPTS} | {WARM_UP.text}
    assert len(texts) == 33
    assert all(20 <= len(text) <= 250 for text in texts)


@pytest.mark.slow
def test_the_real_pair_from_the_command_line(default_target_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "saguaro_core.bench",
        "--prompts",
        "1",
        "--max-new-tokens",
        "24",
        "--json",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    data = json.loads(file.read_text())
    assert data["same_tokens"] is True
    assert all(summary["decode_tokens_per_second"] > 0 for summary in data["modes"].values())
    assert data["modes"]["ssd"]["cache_hit_rate"] is not None
    assert all(ratio > 0 for ratio in data["ratios"].values())
