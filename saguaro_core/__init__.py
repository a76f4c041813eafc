"""The engine of the Saguaro playground: one prompt through AR, SD and SSD on a real model pair.

Importing this package, its settings and its events is cheap: nothing here imports torch.
"""

from importlib.metadata import PackageNotFoundError, version

from saguaro_core.config import (
    EngineConfig,
    GenerationRequest,
    Message,
    Placement,
    SamplingParams,
    SpeculationConfig,
)
from saguaro_core.errors import DraftUnavailable, EngineUnavailable, InvalidRequest, ModelError, SaguaroError

try:
    __version__ = version("saguaro-playground")
except PackageNotFoundError:
    __version__ = "0+unknown"

__all__ = [
    "DraftUnavailable",
    "EngineConfig",
    "EngineUnavailable",
    "GenerationRequest",
    "InvalidRequest",
    "Message",
    "ModelError",
    "Placement",
    "SaguaroError",
    "SamplingParams",
    "SpeculationConfig",
    "__version__",
]
