"""Where target and draft run: reading a placement, disjoint cores, even shares over several devices."""

import os
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
import torch

from saguaro_core.config import Placement
from saguaro_core.errors import InvalidRequest, ModelError
from saguaro_core.models import placement as module
from saguaro_core.models import sharding
from saguaro_core.models.placement import DevicePlan, ResolvedPlacement, resolve_placement

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretends to be a machine with these cores and devices."""

    def pretend(cores: int | tuple[int, ...] = 2, cuda: int = 0, mps: bool = False) -> None:
        numbers = tuple(range(cores)) if isinstance(cores, int) else cores
        monkeypatch.setattr(module, "available_cores", lambda: numbers)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


def resolve(text: str = "auto") -> ResolvedPlacement:
    return resolve_placement(Placement.parse(text))


class TestParse:
    @pytest.mark.parametrize(
        ("text", "target", "draft"),
        [
            ("auto", "auto", "auto"),
            ("target=cpu:0,draft=cpu:1", "cpu:0", "cpu:1"),
            ("draft=cuda:1", "auto", "cuda:1"),
            ("target=cuda:0+cuda:1,draft=cuda:2", "cuda:0+cuda:1", "cuda:2"),
        ],
    )
    def test_reads_the_command_lines_form(self, text: str, target: str, draft: str) -> None:
        assert Placement.parse(text) == Placement(target=target, draft=draft)

    @pytest.mark.parametrize("text", ["", "cpu", "target", "target=", "taget=cpu", "target=cpu,,draft=cpu"])
    def test_names_what_it_cannot_read_and_how_to_write_it(self, text: str) -> None:
        with pytest.raises(InvalidRequest, match="write auto, or target=DEVICE,draft=DEVICE") as caught:
            Placement.parse(text)
        assert repr(text) in str(caught.value)


class TestAuto:
    @pytest.mark.parametrize("cores", [2, 3, 4, 8, 64, (3, 5, 9)])
    def test_cpu_cores_are_disjoint_and_all_used(self, machine: Machine, cores: int | tuple[int, ...]) -> None:
        machine(cores)
        placed = resolve()
        numbers = tuple(range(cores)) if isinstance(cores, int) else cores
        assert placed.target.cores + placed.draft.cores == numbers
        assert 1 <= len(placed.draft.cores) <= 4
        assert placed.target.is_cpu
        assert placed.draft.is_cpu
        assert placed.num_devices == 2
        assert placed.notes == ()

    def test_one_core_is_shared_and_said_to_be(self, machine: Machine) -> None:
        machine((7,))
        placed = resolve()
        assert placed.target == placed.draft == DevicePlan(("cpu",), (7,))
        assert placed.num_devices == 1
        assert placed.notes == ("Target and draft share the cores [7]: overlap is limited.",)

    @pytest.mark.parametrize(
        ("cuda", "target", "draft"),
        [
            (2, ("cuda:0",), ("cuda:1",)),
            (5, ("cuda:0", "cuda:1", "cuda:2", "cuda:3"), ("cuda:4",)),
        ],
    )
    def test_several_gpus(self, machine: Machine, cuda: int, target: tuple[str, ...], draft: tuple[str, ...]) -> None:
        machine(8, cuda=cuda)
        placed = resolve()
        assert (placed.target.devices, placed.draft.devices) == (target, draft)
        assert (placed.target.cores, placed.num_devices, placed.notes) == ((), 2, ())
        assert placed.target.describe() == "+".join(target)

    def test_one_gpu_serves_both_and_the_notes_say_so(self, machine: Machine) -> None:
        machine(8, cuda=1)
        placed = resolve()
        assert placed.target == placed.draft == DevicePlan(("cuda:0",))
        assert placed.num_devices == 1
        assert placed.notes == ("Target and draft share one device: overlap is limited.",)

    def test_mps_gives_the_draft_the_cpu(self, machine: Machine) -> None:
        machine(4, mps=True)
        placed = resolve()
        assert placed.target == DevicePlan(("mps",))
        assert placed.draft == DevicePlan(("cpu",), (0, 1, 2, 3))
        assert placed.notes == ()


class TestExplicit:
    def test_named_cores_are_taken_as_they_are(self, machine: Machine) -> None:
        machine(8)
        placed = resolve("target=cpu:0-5,draft=cpu:6-7")
        assert placed.target.cores == (0, 1, 2, 3, 4, 5)
        assert placed.draft.cores == (6, 7)

    @pytest.mark.parametrize(
        ("text", "target", "draft"),
        [
            ("target=cpu:1", (1,), (0, 2, 3)),
            ("draft=cpu:0-1", (2, 3), (0, 1)),
            ("target=cpu,draft=cpu:3", (0, 1, 2), (3,)),
            ("target=cpu,draft=cpu", (0, 1, 2), (3,)),
        ],
    )
    def test_the_other_model_gets_the_rest(
        self, machine: Machine, text: str, target: tuple[int, ...], draft: tuple[int, ...]
    ) -> None:
        machine(4)
        placed = resolve(text)
        assert (placed.target.cores, placed.draft.cores) == (target, draft)

    @pytest.mark.parametrize(
        ("text", "shared"), [("target=cpu:0-3", [0, 1, 2, 3]), ("target=cpu:0-2,draft=cpu:2-3", [2])]
    )
    def test_shared_cores_are_noted(self, machine: Machine, text: str, shared: list[int]) -> None:
        machine(4)
        assert resolve(text).notes == (f"Target and draft share the cores {shared}: overlap is limited.",)

    def test_a_gpu_for_one_leaves_the_cpu_to_the_other(self, machine: Machine) -> None:
        machine(4, cuda=1)
        placed = resolve("target=cuda:0,draft=cpu:2-3")
        assert placed.draft == DevicePlan(("cpu",), (2, 3))
        assert placed.num_devices == 2

    @pytest.mark.parametrize("text", ["cpu:0", "cpu:0-3", "cpu:2-3"])
    def test_a_description_can_be_written_back(self, machine: Machine, text: str) -> None:
        machine(8)
        plan = resolve(f"target={text}").target
        assert resolve(f"target={plan.describe()}").target == plan

    def test_cores_with_gaps_are_listed(self) -> None:
        assert DevicePlan(("cpu",), (0, 2, 3)).describe() == "cpu:0,2,3"
        assert DevicePlan(("cpu",)).describe() == "cpu"


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cpu:9", "this process may use [0, 1, 2, 3]"),
        ("cpu:2-9", "this process may use [0, 1, 2, 3]"),
        ("cpu:3-1", "this process may use [0, 1, 2, 3]"),
        ("cpu:x", "write cpu:2 or cpu:0-3"),
        ("cpu:-1", "write cpu:2 or cpu:0-3"),
        ("gpu", "write cpu, cpu:0-3, cuda:0, cuda:0+cuda:1 or mps"),
        ("cuda:0+", "write cpu, cpu:0-3, cuda:0, cuda:0+cuda:1 or mps"),
        ("cuda:3", "1 CUDA devices are here, counted from 0"),
        ("cuda:0+cuda:1", "1 CUDA devices are here, counted from 0"),
        ("mps", "Apple MPS is not available here; use cpu"),
        ("meta", "cpu, cuda and mps are supported"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_impossible_device_is_named_with_its_remedy(machine: Machine, role: str, device: str, reason: str) -> None:
    machine(4, cuda=1)
    with pytest.raises(InvalidRequest) as caught:
        resolve(f"{role}={device}")
    assert reason in str(caught.value)
    assert any(repr(part) in str(caught.value) for part in [device, *device.split("+")])


def test_occupying_cores_pins_every_thread_and_sizes_the_thread_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: done.append((pid, cores)), raising=False)
    monkeypatch.setattr(torch, "set_num_threads", done.append)
    module.occupy(DevicePlan(("cuda:0",)))
    module.occupy(DevicePlan(("cpu",)))
    assert done == []
    module.occupy(DevicePlan(("cpu",), (2, 3)))
    assert done.pop() == 2
    threads = [int(name) for name in os.listdir("/proc/self/task")] if sys.platform == "linux" else []
    assert done == [(thread, (2, 3)) for thread in threads]


def test_the_process_has_cores() -> None:
    assert module.available_cores()
    assert resolve("target=cpu,draft=cpu").target.cores


class TestSharding:
    @pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cuda:1", "cuda:3", "cuda:4"), ("cuda:0",)])
    def test_layers_spread_evenly_and_stay_whole(
        self, tiny_llama: Callable[..., Path], devices: tuple[str, ...]
    ) -> None:
        placed = sharding.even_device_map(str(tiny_llama(num_layers=12)), devices)
        indices = [int(device.removeprefix("cuda:")) for device in devices]
        assert set(placed.values()) == set(indices)
        layers = {name: place for name, place in placed.items() if "layers" in name}
        assert all(name.split(".")[-1].isdigit() for name in layers)
        if len(devices) > 1:
            counts = [list(layers.values()).count(index) for index in indices]
            assert sum(counts) == 12
            assert max(counts) - min(counts) <= 4
            assert [place for place, _ in groupby(layers.values())] == indices

    def test_a_missing_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError):
            sharding.even_device_map(str(tmp_path / "nothing"), ("cuda:0", "cuda:1"))
