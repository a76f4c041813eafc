"""Measuring the application's memory, over a stand-in that answers as the application does."""

import sys
from pathlib import Path

import pytest

from saguaro_core import bench_app
from saguaro_core.bench_app import AppFailedError, measure_app_memory
from saguaro_core.config import EngineConfig

STAND_IN = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

held = bytearray(30_000_000)
outcome = {outcome!r}


class Handler(BaseHTTPRequestHandler):
    def _answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self._answer('{{"state": "ready"}}' if self.path == "/api/status" else outcome)

    def do_POST(self):
        data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert data["data"][0] and data["data"][1]["max_new_tokens"]
        self._answer('{{"event_id": "1"}}')

    def log_message(self, *args):
        pass


if "broken" in sys.argv:
    sys.exit(3)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, outcome: str = "event: complete") -> None:
    script = folder / "app.py"
    script.write_text(STAND_IN.format(outcome=outcome), "utf-8")
    monkeypatch.setattr(bench_app, "_APP", script)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_the_application_is_started_asked_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    text, data = measure_app_memory(EngineConfig())
    assert "app" in text
    assert "under 1.6 GB resident: yes" in text
    memory = data["app_memory"]
    assert [process["name"] for process in memory["processes"]] == ["app"]
    assert 30_000_000 < memory["peak_pss_bytes"] < 200_000_000


def test_an_application_that_ends_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    with pytest.raises(AppFailedError, match="ended with exit status 3"):
        measure_app_memory(EngineConfig(target="broken"))


def test_a_comparison_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, outcome="event: error")
    with pytest.raises(AppFailedError, match="did not end: event: error"):
        measure_app_memory(EngineConfig())
