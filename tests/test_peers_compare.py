"""The comparison over scripted peers: the fastest way is measured, nobody's failure costs another's row, the table."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_bench import INFO, Outcome, ScriptedEngine, command_line

from saguaro_core.bench_measure import BenchPlan, Measurement
from saguaro_core.bench_options import read_command
from saguaro_core.config import EngineConfig, SamplingParams, SpeculationConfig
from saguaro_core.events import RunFinished
from saguaro_core.models.placement import available_cores
from saguaro_core.peers.compare import PeerComparison, compare_peers
from saguaro_core.peers.kinds import QUANTISED, Launcher, PeerKind, PeerOptions
from saguaro_core.peers.launch import PeerFailed, run_process
from saguaro_core.peers.prepare import prepare
from saguaro_core.peers.protocol import Answer, Variant
from saguaro_core.peers.report import format_peers, peers_to_json
from saguaro_core.peers.rows import OwnSpeeds, PeerRow, own_speeds
from saguaro_core.prompts import select_prompts
from saguaro_core.run_figures import RunFigures
from saguaro_core.status import EngineInfo

# Every variant yields tokens 0, 1, 2... after a first one, at a fixed pace; an option says how it misbehaves.
SCRIPT = """
import json, sys
job = json.load(sys.stdin)
def answer(pace, shift):
    ids = [i + (shift if i == 2 else 0) for i in range(min(4, job["max_new_tokens"]))]
    return {"token_ids": ids, "times": [0.5 + pace * i for i in range(len(ids))]}
def result(o):
    if "error" in o:
        return {"error": o["error"]}
    return {"answers": [answer(o["pace"], o.get("shift", 0)) for _ in job["prompts"]], "notes": ["a note"]}
print("noise of a library")
print(json.dumps({"results": [result(v["options"]) for v in job["variants"]], "peak_memory_bytes": 123000000}))
"""
PLAN = BenchPlan(
    modes=("ar", "ssd"),
    prompts=select_prompts(2),
    repeats=1,
    sampling=SamplingParams(max_new_tokens=4),
    speculation=SpeculationConfig(),
)
OWN = OwnSpeeds(
    token_ids={0: (0, 1, 2, 3), 1: (0, 1, 2, 3)},
    speeds={"ar": {0: 20.0, 1: 40.0}, "ssd": {0: 50.0, 1: 50.0}},
    first_tokens={"ar": 0.1, "ssd": 0.2},
    peak_memory_bytes=900_000_000,
)
SLOW = Variant(name="slow way", options={"pace": 0.1})
FAST = Variant(name="fast way", options={"pace": 0.01})
BROKEN = Variant(name="broken way", options={"error": "no such kernel"})


def make_kind(title: str, *variants: Variant, command: tuple[str, ...] | str = SCRIPT) -> PeerKind:
    script = (sys.executable, "-c", command) if isinstance(command, str) else command
    return PeerKind(
        name=title,
        title=title,
        arithmetic=QUANTISED,
        needs_gguf=False,
        variants=lambda options, lookahead: variants,
        find=lambda options: Launcher(command=script, version="script 1"),
    )


@pytest.fixture
def compare(tiny_llama: Callable[..., Path]) -> Callable[..., dict[tuple[str, int], PeerRow]]:
    """Rows by title and number of threads, for a target on the first core and no draft."""
    info = replace(INFO, target=replace(INFO.target, cores=available_cores()[:1]), draft=None)
    config = EngineConfig(target=str(tiny_llama()))

    def call(*kinds: PeerKind, timeout: float = 60.0) -> dict[tuple[str, int], PeerRow]:
        options = PeerOptions(timeout=timeout)
        comparison = compare_peers(OWN, PLAN, config, info, options, lambda text: None, peers=kinds)
        return {(row.title, row.num_threads): row for row in comparison.rows}

    return call


def test_the_fastest_way_is_measured_and_the_others_are_told(compare: Callable[..., dict[object, PeerRow]]) -> None:
    row = compare(make_kind("peer", SLOW, BROKEN, FAST))["peer", 1]
    assert (row.how, row.version, row.arithmetic, row.error) == ("fast way", "script 1", QUANTISED, None)
    assert row.tried == {"slow way": pytest.approx(10.0), "fast way": pytest.approx(100.0)}
    assert row.decode_tokens_per_second == pytest.approx(100.0)
    assert row.ratios == {"ar": pytest.approx(3.75), "ssd": pytest.approx(2.0)}
    assert (row.time_to_first_token, row.differences, row.peak_memory_bytes) == (0.5, (), 123_000_000)
    assert row.notes == ("a note",)


def test_one_that_fails_costs_its_own_row_only(compare: Callable[..., dict[object, PeerRow]]) -> None:
    rows = compare(
        make_kind("broken", BROKEN),
        make_kind("dies", FAST, command="raise SystemExit('out of luck')"),
        make_kind("mute", FAST, command="print('{}')"),
        replace(make_kind("missing", FAST), find=lambda options: "not installed: npm install it"),
        replace(make_kind("no file", FAST), needs_gguf=True),
        make_kind("good", FAST),
    )
    assert rows["broken", 1].error == "no such kernel"
    assert rows["dies", 1].error == "its process ended with exit status 1: out of luck"
    assert "its output could not be read" in str(rows["mute", 1].error)
    assert rows["missing", 0].error == "not installed: npm install it"
    assert "no GGUF file of" in str(rows["no file", 0].error)
    assert rows["good", 1].error is None


def test_one_that_hangs_is_ended(compare: Callable[..., dict[object, PeerRow]]) -> None:
    row = compare(make_kind("hangs", FAST, command="import time; time.sleep(60)"), timeout=1.0)["hangs", 1]
    assert row.error == "it did not finish within 1 s: give more with --peers-timeout"


@pytest.mark.slow
def test_where_an_answer_parts_the_target_is_asked(compare: Callable[..., dict[object, PeerRow]]) -> None:
    row = compare(make_kind("other", Variant(name="way", options={"pace": 0.01, "shift": 5})))["other", 1]
    assert row.differences is not None
    first, second = row.differences
    assert (first.prompt, first.index, first.token_ids) == (0, 2, (2, 7))
    assert first.gap is not None
    assert second.gap is None
    text = format_peers(PeerComparison(own=OWN, rows=(row,), core_sets=((0,),)))
    assert "other, 1 thread: 2 of 2, the earliest after 2 tokens of prompt 1\n" in text
    assert f"{QUANTISED}; ours token 2, theirs token 7, {abs(first.gap):.4f} apart in float32" in text


def test_a_process_keeps_to_its_cores_and_threads() -> None:
    core = available_cores()[-1]
    script = "import os; print(len(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    assert run_process((sys.executable, "-c", script), b"", (core,), 30.0) == b"1 1"
    assert len(available_cores()) >= 1
    with pytest.raises(PeerFailed, match="exit status 0: it said nothing"):
        run_process((sys.executable, "-c", ""), b"", (core,), 30.0)


def test_both_sets_of_cores_are_compared_where_the_pair_has_more(tiny_llama: Callable[..., Path]) -> None:
    if len(available_cores()) < 2:
        pytest.skip("needs two cores")
    first, second = available_cores()[:2]
    draft = replace(INFO.target, cores=(second,))
    info: EngineInfo = replace(INFO, target=replace(INFO.target, cores=(first,)), draft=draft)
    config = EngineConfig(target=str(tiny_llama()))
    comparison = compare_peers(OWN, PLAN, config, info, PeerOptions(), lambda _: None, peers=(make_kind("p", FAST),))
    assert comparison.core_sets == ((first,), (first, second))
    assert [row.num_threads for row in comparison.rows] == [1, 2]
    lines = format_peers(comparison).splitlines()
    assert lines[1].split() == ["this", "engine,", "AR", "1", "30.0", "1.00", "0.60", "0.10", "900"]
    assert lines[2].split() == ["this", "engine,", "SSD", "1+1", "50.0", "1.88", "1.00", "0.20", "900"]
    assert lines[4].split() == ["p", "2", "100.0", "3.75", "2.00", "0.50", "yes", "123"]


def test_the_table_says_how_and_why(compare: Callable[..., dict[object, PeerRow]]) -> None:
    rows = compare(make_kind("fast", SLOW, FAST), make_kind("broken", BROKEN))
    info = replace(INFO, target=replace(INFO.target, cores=()))
    config = EngineConfig(target="anything")
    empty = compare_peers(OWN, PLAN, config, info, PeerOptions(), lambda _: None, peers=())
    assert format_peers(empty) == "notes:\n  peers are measured on CPU cores; the target runs on cpu:0.\n"
    text = format_peers(replace(empty, rows=tuple(rows.values()), core_sets=((0,),)))
    details = "tokens/s of what was tried: slow way 10.0; fast way 100.0\n    a note\n"
    assert f"how each was used:\n  fast, 1 thread: script 1, fast way\n    {details}" in text
    assert f"faster than our SSD:\n  fast, 1 thread: 2.00 times as fast, with {QUANTISED}\n" in text
    assert "not measured:\n  broken, 1 thread: no such kernel\n" in text
    data = peers_to_json(replace(empty, rows=tuple(rows.values())))
    assert [row["title"] for row in data["rows"]] == ["fast", "broken"]


def test_speed_is_counted_as_the_engine_counts_it() -> None:
    block = Answer(token_ids=(1, 2, 3, 4), times=(1.0, 1.0, 1.5, 2.0))
    assert block.decode_tokens_per_second == pytest.approx(2.0)
    assert Answer(token_ids=(1,), times=(1.0,)).decode_tokens_per_second is None
    assert Answer(token_ids=(), times=()).decode_tokens_per_second is None


def test_our_side_is_the_median_over_repeats_and_the_first_answer() -> None:
    def measured(speed: float, repeat: int, ids: tuple[int, ...]) -> Measurement:
        figures = RunFigures(decode_tokens_per_second=speed, time_to_first_token=0.1)
        finished = RunFinished(
            run_id="r", status="finished", stop_reason="length", time=1.0, text="", token_ids=ids, figures=figures
        )
        return Measurement(mode="ar", column="ar", prompt=0, repeat=repeat, finished=finished)

    own = own_speeds([measured(10.0, 0, (1,)), measured(30.0, 1, (2,)), measured(11.0, 2, (3,))], 5)
    assert own.speeds == {"ar": {0: 11.0}}
    assert own.token_ids == {0: (1,)}
    assert (own.first_tokens, own.peak_memory_bytes) == ({"ar": 0.1}, 5)


def test_peers_get_the_prompts_as_the_engine_reads_them(tiny_llama: Callable[..., Path]) -> None:
    prepared = prepare(str(tiny_llama()), select_prompts(2))
    assert len(prepared.prompts) == 2
    assert prepared.prompts[0][0] == 1  # The template's <|im_start|>.
    assert prepared.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "0.8"], "temperature is 0.8: --peers compares greedy answers"),
        (["--modes", "sd,ssd"], "modes is 'sd,ssd': --peers compares with our AR"),
        (["--peers-timeout", "0"], "peers_timeout is 0.0"),
        (["--peers-node", "/nowhere"], "peers_node is '/nowhere'"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        read_command(["--peers", *arguments])
    assert message in capsys.readouterr().err


def test_the_benchmark_ends_with_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call: Callable[..., Outcome] = command_line(tmp_path, capsys)
    elsewhere = ScriptedEngine(info=replace(INFO, target=replace(INFO.target, cores=())))
    outcome = call(elsewhere, "--prompts", "1", "--max-new-tokens", "5", "--peers")
    assert outcome.status == 0
    assert outcome.out.endswith("notes:\n  peers are measured on CPU cores; the target runs on cpu:0.\n")
    assert outcome.data["peers"]["rows"] == []
