"""The profile: a clock that gives every moment to one label, the table, and once both real processes."""

from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import save_tiny_llama

from saguaro_core import bench_profile_draft, bench_profile_target
from saguaro_core.bench_measure import BenchPlan
from saguaro_core.bench_profile import ROUND_LABELS, format_profile, profile
from saguaro_core.bench_profile_file import Profile, ProfileFile
from saguaro_core.bench_sections import REST, SectionClock, Total
from saguaro_core.config import EngineConfig, SamplingParams, SpeculationConfig
from saguaro_core.prompts import select_prompts


class Time:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


def sums(clock: SectionClock) -> dict[str, float]:
    return {label: total.seconds for label, total in clock.totals.items()}


def test_every_moment_counts_once_under_the_innermost_label() -> None:
    time = Time()
    clock = SectionClock(clock=time)
    inner = clock.timed(lambda: time.spend(2.0), "inner")

    def outer_work() -> None:
        time.spend(1.0)
        inner()
        time.spend(0.5)

    outer, opaque = clock.timed(outer_work, "outer"), clock.timed(outer_work, "opaque", is_opaque=True)
    outer()
    clock.start()
    time.spend(4.0)
    outer()
    opaque()
    inner()
    clock.stop()
    outer()
    assert sums(clock) == {REST: 4.0, "outer": 1.5, "inner": 4.0, "opaque": 3.5}
    assert {label: total.calls for label, total in clock.totals.items() if label != REST} == {
        "outer": 1,
        "inner": 2,
        "opaque": 1,
    }


def test_a_section_that_raises_ends_there() -> None:
    time = Time()
    clock = SectionClock(clock=time)

    def fail() -> None:
        time.spend(1.0)
        raise KeyError

    clock.start()
    with pytest.raises(KeyError):
        clock.timed(fail, "fails", is_opaque=True)()
    clock.timed(lambda: time.spend(3.0), "next")()
    assert sums(clock) == {REST: 0.0, "fails": 1.0, "next": 3.0}


def test_work_in_steps_is_timed_while_it_runs_and_names_its_forwards() -> None:
    time = Time()
    clock = SectionClock(clock=time)
    forward = clock.timed_forward(lambda runner, batch: time.spend(10.0))
    batch = SimpleNamespace(token_ids=torch.zeros(1, 3))

    def inner() -> Generator[object, object, str]:
        time.spend(1.0)
        yield batch
        time.spend(2.0)
        return "done"

    timed_inner = clock.timed(inner, "inner")

    def outer() -> Generator[object, object, str]:
        time.spend(0.5)
        said: str = yield from timed_inner()
        return said

    steps = clock.timed(outer, "outer")()
    clock.start()
    wanted = steps.send(None)
    time.spend(4.0)
    forward(None, wanted)
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    assert end.value.value == "done"
    assert sums(clock) == {REST: 4.0, "outer": 0.5, "inner": 3.0, "inner: forward": 10.0}
    assert clock.forwards == {3: Total(10.0, 1)}


@pytest.mark.parametrize("module", [bench_profile_target, bench_profile_draft])
def test_every_profiled_method_exists(module: SimpleNamespace) -> None:
    assert [s for s in module.SECTIONS if not callable(getattr(s.owner, s.method, None))] == []
    side = module.__name__.rpartition("_")[2]
    assert ROUND_LABELS[side] == module.ROUND_LABEL


def test_sums_travel_through_the_file_and_are_shown_side_by_side(tmp_path: Path) -> None:
    file, time = ProfileFile(tmp_path / "target.jsonl"), Time()
    clock = SectionClock(clock=time)
    decide = clock.timed(lambda: time.spend(0.004), ROUND_LABELS["target"])
    forward = clock.timed_forward(lambda runner, batch: time.spend(0.036))
    for num_rounds in (10, 30):
        clock.start()
        for _ in range(num_rounds):
            forward(None, SimpleNamespace(token_ids=torch.zeros(1, 4)))
            decide()
        clock.stop()
        file.write(clock)
    target = Profile.sum(file.read())
    draft = Profile({ROUND_LABELS["draft"]: Total(0.1, 40)}, {})
    text = format_profile({"target": target, "draft": draft})
    assert "target, mean of 40 rounds" in text
    assert "draft, mean of 40 rounds" in text
    lines = [line.split() for line in text.splitlines()]
    assert lines[1][:3] == ["forward", "36.00", "90%"]
    assert lines[2][:5] == ["commit", "the", "tokens", "4.00", "10%"]
    assert "target, forward of 4 rows: 36.00 ms, 1.00 a round" in text
    assert "only 40 rounds" in text


@pytest.mark.slow
def test_both_processes_are_profiled(tmp_path: Path) -> None:
    target, draft = save_tiny_llama(tmp_path / "target"), save_tiny_llama(tmp_path / "draft")
    plan = BenchPlan(
        modes=("ssd",),
        prompts=select_prompts(2),
        repeats=1,
        sampling=SamplingParams(max_new_tokens=24),
        speculation=SpeculationConfig(),
    )
    text, data = profile(plan, EngineConfig(target=str(target), draft=str(draft)))
    sides = data["profile"]
    assert sides["target"]["num_rounds"] >= 2 * 24 / 4
    assert abs(sides["target"]["num_rounds"] - sides["draft"]["num_rounds"]) <= 4
    assert sides["draft"]["parts"]["build: branch passes: forward"]["calls"] > 0
    assert sum(part["seconds"] for part in sides["target"]["parts"].values()) > 0
    assert "wait for the draft" in text
