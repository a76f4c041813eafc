"""Fixtures shared by all tests: the real default pair, tiny models, a browser, and when a test is skipped and why."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from saguaro_core.config import EngineConfig
from saguaro_core.engine import Engine
from saguaro_core.errors import ModelError
from saguaro_core.models.catalogue import DEFAULT_TARGET
from saguaro_core.models.fetch import fetch_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tiny tensors on several threads wait for each other longer than they compute, most of all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts this in the background has interrupts ignored, and tests that interrupt would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_IN_CI = bool(os.environ.get("CI"))
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# Files whose tests work engines, browsers or the whole application hard, or wait for what must come within a second or
# less: two at once would only wait for each other. `make test` runs them one after the other, all others side by side.
_ALONE = (
    *("app", "bench_command", "bench_memory", "bench_profile", "engine_batch", "engine_control", "engine_equality"),
    *("engine_failures", "engine_self_draft", "interruptions", "messages", "page_cost", "peers_llama"),
    *("peers_transformers", "prefix_reuse", "ui_comparisons", "ui_server"),
)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if _IN_CI else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that no other test may run beside."""
    for item in items:
        is_browsing = item.path.parent.name == "browser"
        if is_browsing or item.path.stem.removeprefix("test_").startswith(_ALONE):
            item.add_marker(pytest.mark.alone)


def _skip_or_fail(reason: str) -> None:
    """Something the machine lacks: a skip for a user, a failure in CI, where it must be there."""
    if _IN_CI:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _gpu_or_skip(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def default_target_dir() -> Path:
    """The default target in the user's cache, fetched on first use."""
    try:
        return fetch_model(DEFAULT_TARGET)
    except ModelError as error:
        _skip_or_fail(str(error))
        raise


@pytest.fixture(scope="session")
def engine(default_target_dir: Path) -> Iterator[Engine]:
    """One ready engine on the default pair for all tests that leave it as they found it."""
    with Engine(EngineConfig()) as engine:
        engine.wait_ready(300)
        yield engine


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """The system's Chromium; tests never download a browser."""
    found = next((path for path in map(shutil.which, _BROWSERS) if path), None)
    if found is None:
        _skip_or_fail("No Chromium was found: install the package `chromium` to run the browser tests.")
        raise AssertionError("not reached")
    return found


@pytest.fixture(scope="session")
def tiny_tokenizer() -> "PreTrainedTokenizerBase":
    """A byte-level tokenizer with control tokens and a chat template."""
    from tiny_models import make_tokenizer

    return make_tokenizer()


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Callable[..., Path]:
    """Saves a small random Llama with a tokenizer below the test's own folder and returns where."""
    from tiny_models import save_tiny_llama

    def save(name: str = "model", **options: object) -> Path:
        return save_tiny_llama(tmp_path / name, **options)  # type: ignore[arg-type]

    return save
