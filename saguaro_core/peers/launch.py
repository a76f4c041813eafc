"""Starts a peer's process on its cores, hands it a job, and waits for the output, but not for ever."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from saguaro_core.errors import SaguaroError
from saguaro_core.peers.kinds import Launcher
from saguaro_core.peers.protocol import Job, Output, decode_output, encode

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_KEPT_ERROR = 300


class PeerFailed(SaguaroError):
    """A peer's process gave no output; the others go on."""


def run_job(launcher: Launcher, job: Job, timeout: float) -> Output:
    """Run the job to its end. Raises PeerFailed with the reason."""
    try:
        return decode_output(run_process(launcher.command, encode(job), job.cores, timeout))
    except msgspec.DecodeError as error:
        raise PeerFailed(f"its output could not be read: {error}") from error


def run_process(command: tuple[str, ...], data: bytes, cores: tuple[int, ...], timeout: float) -> bytes:
    """The last line that a process writes when it is given `data`. Raises PeerFailed."""
    with tempfile.TemporaryFile() as errors:
        with _on_cores(cores):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=_environment(len(cores))
            )
        lines = _communicate(process, data, timeout).splitlines()
        if process.returncode != 0 or not lines:
            raise PeerFailed(f"its process ended with exit status {process.returncode}: {_last_line(errors.fileno())}")
        return lines[-1]


def _communicate(process: "subprocess.Popen[bytes]", data: bytes, timeout: float) -> bytes:
    """What the process writes until it ends; it does not outlive this call."""
    with process:
        try:
            return process.communicate(data, timeout)[0]
        except subprocess.TimeoutExpired:
            raise PeerFailed(f"it did not finish within {timeout:g} s: give more with --peers-timeout") from None
        finally:
            process.kill()


def _environment(num_threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(num_threads)}


@contextlib.contextmanager
def _on_cores(cores: tuple[int, ...]) -> Iterator[None]:
    """A process started inside inherits these cores; where the system cannot pin, nothing happens."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _last_line(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    lines = os.pread(descriptor, size, 0).decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:_KEPT_ERROR] if lines else "it said nothing"
