"""What a finished model folder contains, so that a half-written or damaged one is never used.

The manifest is written last, into a folder that still has its temporary name: a folder that has one is complete.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saguaro_core.models.wheel import sha256_of

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the folder."""

    name: str
    size: int
    sha256: str


def write_manifest(folder: Path, origin: dict[str, Any]) -> None:
    """Record every file of `folder` and where its content came from."""
    files = [
        FileRecord(path.name, path.stat().st_size, sha256_of(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    ]
    data = {"origin": origin, "files": [asdict(record) for record in files]}
    (folder / MANIFEST).write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def find_fault(folder: Path, origin: dict[str, Any], *, deep: bool = False) -> str | None:
    """Why `folder` cannot be used as it is, or None. Sizes only, unless `deep` asks for the hashes too."""
    try:
        data = json.loads((folder / MANIFEST).read_text("utf-8"))
        records = [FileRecord(**record) for record in data["files"]]
        found_origin = data["origin"]
    except FileNotFoundError:
        return "it is not there yet" if not folder.exists() else "its manifest is missing"
    except (ValueError, KeyError, TypeError):
        return "its manifest is unreadable"
    if found_origin != origin:
        return "it was made from another version"
    for record in records:
        path = folder / record.name
        if not path.is_file():
            return f"{record.name} is missing"
        if path.stat().st_size != record.size:
            return f"{record.name} has {path.stat().st_size} bytes instead of {record.size}"
        if deep and sha256_of(path) != record.sha256:
            return f"{record.name} is damaged (its SHA-256 differs)"
    return None
