"""The benchmark's command line over a scripted engine, and once over the real pair: options, failures, exit status."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_bench import INFO, Outcome, ScriptedEngine, command_line

from saguaro_core.bench import main
from saguaro_core.bench_stretch import Stretching
from saguaro_core.prompts import KINDS, PROMPTS, WARM_UP


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    return command_line(tmp_path, capsys)


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
        (["--unknown"], "--unknown"),
        (["--profile", "--memory"], "profile and memory are both given"),
        (["--cpu-weights", "int3"], "cpu_weights is 'int3'"),
        (["--pair", "wide"], "pair is 'wide'"),
        (["--pair", "stretch", "--draft", "d"], "pair is 'stretch' and brings both models"),
        (["--pair", "stretch", "--stretch-noise", "-1"], "stretch_noise is -1"),
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


def test_the_stretch_pair_is_made_and_named_a_fixture(
    bench: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[float] = []

    def make(stretching: Stretching, **_: object) -> Path:
        asked.append(stretching.noise)
        return tmp_path

    monkeypatch.setattr("saguaro_core.bench.stretched_target", make)
    engine = ScriptedEngine()
    outcome = bench(engine, "--pair", "stretch", "--stretch-noise", "0.1", "--quick", "--modes", "ar")
    assert asked == [0.1]
    assert engine.config is not None
    assert (engine.config.target, engine.config.draft) == (str(tmp_path), "smollm2-135m-instruct")
    assert "pair: stretch, a fixture of this benchmark" in outcome.out
    assert (outcome.data["pair"]["name"], outcome.data["pair"]["noise"]) == ("stretch", 0.1)
    assert outcome.data["settings"]["sampling"]["max_new_tokens"] == 32


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
