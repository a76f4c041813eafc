"""Reading the memory of real processes, and how it is shown."""

import subprocess
import sys
import time

import pytest

from saguaro_core.bench_memory import (
    MemoryFigures,
    PeakSampler,
    ProcessMemory,
    format_memory,
    process_tree,
    read_memory,
)

MEGABYTE = 1_000_000
HOLD = "import sys, time; held = bytearray(80_000_000); print(flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")


def test_a_tree_is_measured_with_its_children_and_its_peak() -> None:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        with PeakSampler(process.pid) as sampler:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.3)
            children = process_tree(process.pid)[1:]
            memory = sampler.figures()
        assert len(children) == 1
        assert memory is not None
        assert memory.peak_pss_bytes is not None
        assert len(memory.processes) == 2
        assert memory.processes[1].peak_rss_bytes > 80 * MEGABYTE
        assert 80 * MEGABYTE < memory.pss_bytes <= memory.peak_pss_bytes
        assert memory.pss_bytes <= memory.peak_rss_bytes
    finally:
        for pid in process_tree(process.pid)[1:]:
            subprocess.run(["kill", str(pid)], check=False)
        process.communicate(timeout=10)
    assert read_memory(process.pid) is None


def test_both_sums_are_shown_with_what_they_count() -> None:
    processes = (
        ProcessMemory(name="engine", peak_rss_bytes=500 * MEGABYTE, pss_bytes=400 * MEGABYTE),
        ProcessMemory(name="draft", peak_rss_bytes=300 * MEGABYTE, pss_bytes=200 * MEGABYTE),
    )
    text = "\n".join(format_memory(MemoryFigures(processes=processes, peak_pss_bytes=650 * MEGABYTE)))
    assert "engine 500 MB, draft 300 MB; sum 800 MB" in text
    assert "600 MB together at the end" in text
    assert "650 MB together at the peak" in text
    assert format_memory(None) == ["memory: n/a (only Linux tells what a process holds)"]
