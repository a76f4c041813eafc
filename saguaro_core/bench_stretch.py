"""The benchmark's fixture `stretch`: a target as costly as one of 1.5 billion parameters, made without a download.

It is no model to talk to. Every weight matrix of the default target gets a small seeded perturbation, so that the
unperturbed original, its draft, disagrees with it now and then, and is then embedded in a larger matrix of zeros.
The padding changes nothing that the model computes, but it is read and multiplied in full. The result is an ordinary
Llama folder in the user's cache (3 GB, made once), which loads like any other.
"""

import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from saguaro_core.errors import InvalidRequest, ModelError
from saguaro_core.models.catalogue import DEFAULT_TARGET
from saguaro_core.models.fetch import default_cache_dir
from saguaro_core.models.manifest import find_fault, write_manifest
from saguaro_core.models.progress import Progress, ignore_progress

FOLDER = "stretch-benchmark-fixture"
# The original then agrees with it on nine tokens in ten of eight prompts: with K = 3 an acceptance of 0.73.
NOISE = 0.04
MAX_NOISE = 1.0
_FORMAT = 1
_FREE_BYTES = 4_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the matrices are embedded in. The default sizes give SmolLM2-135M 1.5 billion weights.

    A hidden size of four times the original's makes the rescaled norms exact: the factor is a power of two. Every
    key-value head keeps the number of query heads that share it.
    """

    hidden_size: int = 2304
    intermediate_size: int = 4608
    num_key_value_heads: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretching:
    """The recipe. `noise` is the perturbation's size, relative to the standard deviation of each matrix."""

    base: str = DEFAULT_TARGET
    sizes: Sizes = Sizes()
    noise: float = NOISE
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise <= MAX_NOISE:
            raise InvalidRequest(f"stretch_noise is {self.noise}: give a number from 0 to {MAX_NOISE:g}.")


def stretched_target(
    stretching: Stretching, *, cache_dir: Path | None = None, on_progress: Progress = ignore_progress
) -> Path:
    """The folder of the stretched target, made now unless it is there. Raises ModelError."""
    parent = (cache_dir or default_cache_dir()) / "models"
    folder, origin = parent / FOLDER, {"format": _FORMAT, **asdict(stretching)}
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / f"{FOLDER}.lock"):
            if find_fault(folder, origin) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                _check_free(parent)
                on_progress(f"Writing the fixture {FOLDER} (3 GB, once)", None)
                _build(stretching, folder, origin, cache_dir)
    except OSError as error:
        raise ModelError(
            f"The fixture could not be written to {folder}: {error}. Make the folder writable and free about 4 GB, "
            "or point XDG_CACHE_HOME at another folder."
        ) from error
    return folder


def _check_free(parent: Path) -> None:
    free = shutil.disk_usage(parent).free
    if free < _FREE_BYTES:
        raise ModelError(f"The fixture needs 4 GB in {parent}, which has {free / 1e9:.1f} GB free: free some space.")


def _build(stretching: Stretching, folder: Path, origin: dict[str, Any], cache_dir: Path | None) -> None:
    """Write the folder under a temporary name, its manifest last; the caller holds the lock."""
    # Here and not above: a fixture that is there is found without paying for the import of torch.
    from saguaro_core.bench_stretch_weights import write_stretched

    with tempfile.TemporaryDirectory(prefix=f".unfinished-{FOLDER}-", dir=folder.parent) as work:
        fresh = Path(work) / "stretched"
        fresh.mkdir()
        write_stretched(stretching, fresh, cache_dir)
        write_manifest(fresh, origin)
        fresh.rename(folder)
