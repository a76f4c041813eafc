"""The peers: what each is called, the ways of using it that are tried, and what it needs.

The ways of a peer are tried on a few tokens first; the fastest is measured, so that nobody is compared at less than
its best.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from saguaro_core.peers.protocol import Variant

NODE_SCRIPT = Path(__file__).resolve().parent.parent / "assets" / "peers" / "llama.mjs"
_NODE_PACKAGE = Path("node_modules") / "node-llama-cpp" / "package.json"
_DTYPES = ("float32", "float16", "bfloat16")

QUANTISED = "4-bit weights times 8-bit activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """How the peers are run: where node-llama-cpp was installed, seconds for each process, and whether to compile."""

    node_folder: Path | None = None
    timeout: float = 900.0
    compile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How a peer's process is started; `version` names the library."""

    command: tuple[str, ...]
    version: str
    module_folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKind:
    """One peer. `find` returns its launcher, or how to install it as a text."""

    name: str
    title: str
    arithmetic: str | None
    needs_gguf: bool
    variants: Callable[[PeerOptions, int], tuple[Variant, ...]]
    find: Callable[[PeerOptions], Launcher | str]


def _plain_variants(options: PeerOptions, lookahead: int) -> tuple[Variant, ...]:
    ways = [_way(dtype) for dtype in _DTYPES]
    ways.append(Variant(name="float32, eager attention", options={"dtype": "float32", "attention": "eager"}))
    ways.append(_way("float32", "static cache", static_cache=True))
    if options.compile:
        ways += [_way(dtype, "static cache, compiled", compile=True) for dtype in ("float32", "float16")]
    return tuple(ways)


def _assisted_variants(options: PeerOptions, lookahead: int) -> tuple[Variant, ...]:
    """Our own lookahead, and transformers' defaults: up to 20 tokens while the draft is 40% sure."""
    fixed = [_way(dtype, f"{lookahead} draft tokens", assistant_tokens=lookahead) for dtype in _DTYPES]
    return (*fixed, *(_way(dtype, "as many draft tokens as it is sure of") for dtype in _DTYPES))


def _lookup_variants(options: PeerOptions, lookahead: int) -> tuple[Variant, ...]:
    return tuple(
        _way(dtype, f"up to {count} looked-up tokens", lookup_tokens=count) for dtype in _DTYPES for count in (3, 10)
    )


def _way(dtype: str, how: str = "", **options: int | bool) -> Variant:
    name = f"{dtype}, sdpa, {how}" if how else f"{dtype}, sdpa"
    return Variant(name=name, options={"dtype": dtype, "attention": "sdpa", **options})


def _llama_variants(options: PeerOptions, lookahead: int) -> tuple[Variant, ...]:
    return (
        Variant(name="flash attention", options={"flash_attention": True}),
        Variant(name="plain attention", options={"flash_attention": False}),
    )


def _llama_lookup_variants(options: PeerOptions, lookahead: int) -> tuple[Variant, ...]:
    return tuple(
        Variant(
            name=f"flash attention, up to {count} looked-up tokens",
            options={"flash_attention": True, "lookup_tokens": count},
        )
        for count in (3, 10)
    )


def find_transformers(options: PeerOptions) -> Launcher | str:
    """Always there: the engine itself is built on it."""
    return _python_child("transformers")


def find_llama(options: PeerOptions) -> Launcher | str:
    """llama-cpp-python if it can be imported, else node-llama-cpp in the folder given or in the current one."""
    if find_spec("llama_cpp") is not None:
        return _python_child("llama-cpp-python")
    folder = (options.node_folder or Path.cwd()).expanduser().absolute()
    node, package = shutil.which("node"), folder / _NODE_PACKAGE
    if node is not None and package.is_file():
        release = json.loads(package.read_text("utf-8"))["version"]
        command = (node, str(NODE_SCRIPT))
        return Launcher(command=command, version=f"node-llama-cpp {release}", module_folder=str(folder))
    return (
        "not installed: pip install llama-cpp-python, or npm install node-llama-cpp in a folder and pass "
        "--peers-node FOLDER"
    )


def _python_child(package: str) -> Launcher:
    command = (sys.executable, "-P", "-m", "saguaro_core.peers.child")
    return Launcher(command=command, version=f"{package} {version(package)}")


PEERS: tuple[PeerKind, ...] = (
    PeerKind(
        name="transformers",
        title="transformers, AR",
        arithmetic=None,
        needs_gguf=False,
        variants=_plain_variants,
        find=find_transformers,
    ),
    PeerKind(
        name="transformers-assisted",
        title="transformers, same draft",
        arithmetic=None,
        needs_gguf=False,
        variants=_assisted_variants,
        find=find_transformers,
    ),
    PeerKind(
        name="transformers-lookup",
        title="transformers, prompt lookup",
        arithmetic=None,
        needs_gguf=False,
        variants=_lookup_variants,
        find=find_transformers,
    ),
    PeerKind(
        name="llama",
        title="llama.cpp, AR",
        arithmetic=QUANTISED,
        needs_gguf=True,
        variants=_llama_variants,
        find=find_llama,
    ),
    PeerKind(
        name="llama-lookup",
        title="llama.cpp, prompt lookup",
        arithmetic=QUANTISED,
        needs_gguf=True,
        variants=_llama_lookup_variants,
        find=find_llama,
    ),
)
