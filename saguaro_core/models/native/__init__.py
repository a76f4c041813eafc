"""Llama-like models on the CPU as one compiled function: packed weights, and rows that do not depend on each other."""

import hashlib
from pathlib import Path

import numba
from platformdirs import user_cache_path


def _source_digest() -> str:
    """A short hash of this package's code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# numba notices changes of a compiled function's own file only; these functions contain code of each other's files.
numba.config.CACHE_DIR = str(user_cache_path("saguaro-playground", appauthor=False) / "compiled" / _source_digest())  # type: ignore[attr-defined]
