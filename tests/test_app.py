"""The command: what it refuses and how, that it is up while models load, and that nothing stays behind."""

import errno
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from echo_engine import EchoEngine, Script
from gradio_client import Client
from pages import free_port

import app
from saguaro_core.config import EngineConfig
from storage import LogReader
from ui.server import ServerSettings

ROOT = Path(__file__).parent.parent


def echo_factory(script: Script, engines: list[EchoEngine] | None = None) -> app.EngineFactory:
    def make(config: EngineConfig, on_status: app.StatusListener) -> Any:
        engine = EchoEngine(script, config, on_status=on_status)
        engine.start()
        if engines is not None:
            engines.append(engine)
        return engine

    return make


@pytest.fixture(autouse=True)
def _restore_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """main changes this process's SIGTERM handler and priority; tests must not."""
    monkeypatch.setattr(app, "yield_to_engine", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "port is 99999: give a whole number from 0 to 65535"),
        (["--placement", "gpu"], "placement is 'gpu': write auto, or target=DEVICE,draft=DEVICE"),
        (["--cpu-weights", "int2"], "cpu_weights is 'int2'"),
        (["--max-length", "1"], "max_length is 1: give a whole number from 2"),
        (["--target", ""], "target is '': give a catalogue name, a hub id or a folder"),
        (["--host", "0.0.0.0"], "give --auth user:password as well"),
        (["--auth", "secret"], "auth: write USER:PASSWORD"),
    ],
)
def test_bad_values_are_one_line_and_status_2(
    arguments: list[str], message: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def never(*_: object) -> Any:
        raise AssertionError("an engine was started")

    assert app.main([*arguments, "--database", str(tmp_path / "x.db")], never) == 2
    assert message in caplog.text
    assert "Traceback" not in caplog.text
    assert not (tmp_path / "x.db").exists()


def test_a_port_in_use_is_said_before_anything_is_loaded(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        engines: list[EchoEngine] = []
        arguments = ["--port", str(port), "--database", str(tmp_path / "x.db")]
        assert app.main(arguments, echo_factory(Script(), engines)) == 1
    assert f"Cannot listen on 127.0.0.1:{port}" in caplog.text
    assert "Give another --port" in caplog.text
    assert engines == []


def test_an_error_of_the_system_without_a_text_of_its_own_is_still_a_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(_: object) -> socket.socket:
        raise OSError("no such thing as a network")

    monkeypatch.setattr(app, "open_socket", refuse)
    assert app.main(["--port", "7000", "--database", str(tmp_path / "x.db")], echo_factory(Script())) == 1
    assert "Cannot listen on 127.0.0.1:7000 (no such thing as a network)" in caplog.text


def test_an_error_of_the_system_later_on_is_not_blamed_on_the_address(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def exhausted(*_: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    assert app.main(["--port", "0", "--database", str(tmp_path / "x.db")], exhausted) == 1
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert message == "The system refused something that the program needs: [Errno 24] Too many open files"


def test_a_file_that_is_no_log_is_refused_and_left_alone(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("my notes " * 200)
    assert app.main(["--port", "0", "--database", str(file)], echo_factory(Script())) == 1
    assert str(file) in caplog.text
    assert file.read_text() == "my notes " * 200


def test_a_folder_in_the_place_of_the_log_is_said_in_one_line(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    script = Script(load_seconds=0.2, load_error="enough")
    assert app.main(["--port", "0", "--database", str(tmp_path)], echo_factory(script)) == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("storage")]
    assert warning == f"The log {tmp_path} cannot be written now: it is a folder: give a file in it"


def test_models_that_cannot_be_loaded_end_the_program_with_the_reason(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    script = Script(load_seconds=0.5, load_error="No network and no cached copy of some/model: connect once.")
    assert app.main(["--port", "0", "--database", str(tmp_path / "x.db")], echo_factory(script)) == 1
    assert "No network and no cached copy of some/model" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_page_is_up_while_the_models_load(
    host: str, shown: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    skip_without(host)
    port, engines = free_port(), list[EchoEngine]()
    arguments = ["--host", host, "--port", str(port), "--database", str(tmp_path / "x.db")]
    config, settings = app.read_settings(app.build_parser().parse_args(arguments))
    factory = echo_factory(Script(load_seconds=5.0, load_error="enough"), engines)
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(app.serve(config, settings, tmp_path / "x.db", factory)))
    thread.start()
    status = wait_for(lambda: httpx.get(f"http://{shown}:{port}/api/status").json(), 10)
    assert status["state"] in ("starting", "loading")
    assert httpx.get(f"http://{shown}:{port}/").status_code == 200
    assert f"Open http://{shown}:{port} in a browser" in caplog.text
    thread.join(timeout=20)
    assert statuses == [1]
    assert engines[0].status.state == "closed"


def skip_without(host: str) -> None:
    """Some machines have no IPv6."""
    try:
        app.open_socket(ServerSettings(host=host, port=0)).close()
    except OSError as error:
        pytest.skip(f"nothing can listen on {host} here: {error}")


def wait_for(ask: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if answer := ask():
                return answer
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "no answer in time"
        time.sleep(0.05)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_app_process_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\nimport httpx\nimport app\n"
        "from echo_engine import EchoEngine, Script\nfrom pages import served_page\n"
        f"log = Path({str(tmp_path / 'x.db')!r})\n"
        "with EchoEngine(Script(rate=None)) as engine, served_page(engine, log) as page:\n"
        "    assert httpx.get(page.url).status_code == 200\n"
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def start_app(tmp_path: Path, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    port = free_port()
    command = [sys.executable, "app.py", "--port", str(port), "--database", str(tmp_path / "log.db"), *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    return process, port


@pytest.mark.slow
def test_a_missing_model_is_a_message_and_a_status(tmp_path: Path) -> None:
    process, _ = start_app(tmp_path, "--target", str(tmp_path / "nowhere"))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "nowhere" in output
    assert "Traceback" not in output


def send(process: subprocess.Popen[str], sent: signal.Signals, to_group: bool) -> None:
    """Ctrl-C in a terminal reaches the whole group, kill only one process."""
    if to_group:
        os.killpg(process.pid, sent)
    else:
        process.send_signal(sent)


@contextmanager
def readers_of_a_run(url: str) -> Iterator[Callable[[], str]]:
    """Start a long comparison through the API and follow it as the page does, too; the function gives all that the
    page's reader got, once its stream has ended.
    """
    client = Client(url, verbose=False)
    job = client.submit("Tell me a long story.", {"max_new_tokens": 2000}, api_name="/compare")
    first = wait_for(lambda: next(iter(job.outputs()), None), 30)
    got, told = queue.SimpleQueue[str](), threading.Event()

    def follow() -> None:
        text = ""
        with httpx.stream("GET", f"{url}/api/comparisons/{first['comparison_id']}/events", timeout=60) as response:
            for line in response.iter_lines():
                text += line + "\n"
                told.set()
        got.put(text)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        assert told.wait(10)
        yield lambda: got.get(timeout=10)
    finally:
        thread.join(10)
        client.close()


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_ctrl_c_and_kill_during_a_run_end_the_run_and_its_streams_first(
    sent: signal.Signals, to_group: bool, tmp_path: Path, default_target_dir: Path
) -> None:
    process, port = start_app(tmp_path)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: httpx.get(f"{url}/api/status").json()["state"] == "ready", 120)
        with readers_of_a_run(url) as streamed:
            send(process, sent, to_group)
            output, _ = process.communicate(timeout=20)
            assert streamed().endswith("event: end\ndata: {}\n\n")
    finally:
        process.kill()
    assert process.returncode == 0
    for complaint in ("Traceback", "ERROR", "Cancel"):
        assert complaint not in output
    assert output.splitlines()[-1] == "Closed"
    (entry,) = LogReader(tmp_path / "log.db").history().entries
    assert [(run.mode, run.status) for run in entry.runs] == [(mode, "stopped") for mode in ("ar", "sd", "ssd")]


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_ctrl_c_and_kill_end_everything(
    sent: signal.Signals, to_group: bool, tmp_path: Path, default_target_dir: Path
) -> None:
    process, port = start_app(tmp_path)
    try:
        wait_for(lambda: httpx.get(f"http://127.0.0.1:{port}/api/status").json()["state"] == "ready", 120)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        assert all(child.nice() == 0 for child in children if child.is_running())
        send(process, sent, to_group)
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in output
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert len(gone) == len(children)
