"""The web side without a browser: guards, streams, exports, and the public endpoint."""

import asyncio
import http.client
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
import httpx
import pytest
from echo_engine import EchoEngine, Script
from gradio_client import Client
from gradio_client.exceptions import AppError, AuthenticationError
from pages import ServedPage, served_page

from saguaro_core.errors import InvalidRequest
from storage import LogReader
from ui.comparisons import Comparison
from ui.handlers import Handlers
from ui.lane import LaneState
from ui.routes import event_stream, format_cursors, parse_cursors
from ui.server import ServerSettings, set_up_queue
from ui.settings import CompareSettings


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPage]:
    with EchoEngine(Script(rate=None)) as engine:
        engine.wait_ready(5)
        with served_page(engine, tmp_path_factory.mktemp("served") / "log" / "saguaro.db") as page:
            yield page


@pytest.fixture(scope="module")
def comparison_id(served: ServedPage) -> str:
    """A finished comparison."""
    started = served.service.start('a "quoted" <b>prompt</b>', CompareSettings.from_flat({"max_new_tokens": 12}))
    for _ in served.service.follow(started):
        pass
    return started


def request(url: str, method: str = "GET", path: str = "/", body: bytes = b"", **headers: str) -> tuple[int, str]:
    """One raw request, so that Host and Origin are exactly what the test says."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    text = response.read().decode(errors="replace")
    connection.close()
    return response.status, text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example"])
def test_a_foreign_host_name_is_refused_everywhere(served: ServedPage, host: str) -> None:
    for path in ("/", "/api/status", "/gradio_api/info", "/ui/stage.js"):
        assert request(served.url, path=path, Host=host)[0] == 400


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:7860", "[::1]", "[::1]:7860"])
def test_every_name_of_this_machine_is_answered(served: ServedPage, host: str) -> None:
    assert request(served.url, path="/api/status", Host=host)[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://localhost.evil.example"]
)
def test_a_foreign_origin_cannot_change_anything(served: ServedPage, origin: str) -> None:
    for path in (
        "/gradio_api/upload",
        "/gradio_api/component_server",
        "/gradio_api/queue/join",
        "/gradio_api/run/predict",
    ):
        status, _ = request(served.url, "POST", path, b"{}", Origin=origin, Content_Type="text/plain")
        assert status == 403
    assert request(served.url, "POST", "/gradio_api/queue/join", b"{}", Sec_Fetch_Site="cross-site")[0] == 403


def test_our_own_origin_and_programs_without_one_may(served: ServedPage) -> None:
    for headers in ({"Origin": served.url}, {}):
        status, _ = request(
            served.url, "POST", "/gradio_api/queue/join", b"{}", Content_Type="application/json", **headers
        )
        assert status == 422


def test_the_database_is_never_served(served: ServedPage) -> None:
    path = served.log.recorder.path
    assert path.exists()
    for prefix in ("/gradio_api/file=", "/file=", "/ui/../", "/gradio_api/file/"):
        assert request(served.url, path=f"{prefix}{path}")[0] in (403, 404)
    assert request(served.url, path="/ui/%2e%2e/%2e%2e/app.py")[0] == 404


def test_answers_carry_the_protecting_headers(served: ServedPage) -> None:
    headers = httpx.get(served.url).headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


def test_nothing_on_the_page_names_another_server(served: ServedPage) -> None:
    page = httpx.get(served.url).text
    assert 'src="http' not in page
    assert 'href="http' not in page
    assert httpx.get(f"{served.url}/monitoring").status_code in (403, 404)


def test_status_says_what_is_loaded(served: ServedPage) -> None:
    status = httpx.get(f"{served.url}/api/status").json()
    assert status["state"] == "ready"
    assert status["info"]["target"]["name"] == "smollm2-135m-instruct"


def read_stream(url: str, **headers: str) -> list[tuple[str, str, Any]]:
    """The (event, id, data) frames of one stream, to its end."""
    frames = []
    with httpx.stream("GET", url, headers=headers, timeout=20) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for block in response.read().decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
            if "event" in fields:
                frames.append((fields["event"], fields.get("id", ""), json.loads(fields["data"])))
    return frames


def test_a_stream_tells_all_and_resumes_from_its_last_id(served: ServedPage, comparison_id: str) -> None:
    url = f"{served.url}/api/comparisons/{comparison_id}/events"
    frames = read_stream(url)
    assert [name for name, _, _ in frames] == ["header", "update", "end"]
    _, last_id, update = frames[1]
    assert len(update["lanes"]["ssd"]["tokens"]) == 12
    _, _, resumed = read_stream(url, **{"Last-Event-ID": last_id})[1]
    assert resumed["lanes"]["ssd"]["tokens"] == []
    assert resumed["lanes"]["ssd"]["first"] == 12
    partial = read_stream(f"{url}?cursor=ar.10.0.0,sd.0.0.0,ssd.0.0.0")[1][2]
    assert len(partial["lanes"]["ar"]["tokens"]) == 2


def test_an_unknown_comparison_is_not_found(served: ServedPage) -> None:
    response = httpx.get(f"{served.url}/api/comparisons/nothing/events")
    assert response.status_code == 404
    assert "unknown" in response.text


def test_a_log_that_cannot_be_read_is_said_and_never_a_trace(
    served: ServedPage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(served.log, "reader", LogReader(tmp_path / "gone.db"))
    for path in ("comparisons/stored/events", "comparisons/stored/export.csv", "runs/stored/export.json"):
        response = httpx.get(f"{served.url}/api/{path}")
        assert response.status_code == 503
        assert "gone.db could not be read" in response.json()["detail"]
    found, notice = Handlers(served.service).reuse("stored")
    assert found is None
    assert "gone.db could not be read" in notice["text"]


def test_a_comparison_that_is_gone_cannot_be_reused(served: ServedPage) -> None:
    found, notice = Handlers(served.service).reuse("nothing")
    assert found is None
    assert "deleted" in notice["text"]


def test_a_waiting_reader_hears_that_the_queue_got_shorter() -> None:
    waiting = Comparison("c", "hi", {}, {"ar": LaneState("r", "ar")}, 0.0)
    lengths = iter([2, 2, 1, 1, 0])

    async def frames() -> list[str]:
        stream = event_stream(waiting, {}, lambda: next(lengths), pause=0.0)
        return [await anext(stream) for _ in range(4)]

    header, update, *rest = asyncio.run(frames())
    assert header.startswith("event: header")
    assert '"ahead":2' in update
    assert rest == ['event: ahead\ndata: {"ahead":1}\n\n', 'event: ahead\ndata: {"ahead":0}\n\n']


def test_the_framework_refuses_no_call_because_of_its_own_queue() -> None:
    async def queue() -> Any:
        # Outside of a running loop the framework makes loops that nobody closes.
        page = gr.Blocks()
        set_up_queue(page)
        return page._queue

    assert asyncio.run(queue()).max_size is None


@pytest.mark.parametrize("text", ["", "x", "ar.1.2", "ar.1.2.-3", "ar.1.2.99999999999", "zz.1.2.3", "ar.1.2.3,"])
def test_unreadable_cursors_start_from_the_beginning_or_mean_what_they_say(text: str) -> None:
    assert parse_cursors(text) in ({}, {"ar": (1, 2, 3)})
    assert parse_cursors(format_cursors({"sd": (4, 5, 6)})) == {"sd": (4, 5, 6)}


def test_exports_of_a_comparison_and_of_a_run(served: ServedPage, comparison_id: str) -> None:
    base = f"{served.url}/api/comparisons/{comparison_id}"
    export = httpx.get(f"{base}/export.json")
    assert export.headers["content-disposition"].startswith("attachment; filename=")
    assert "quoted" in json.dumps(export.json())
    lines = httpx.get(f"{base}/export.jsonl").text.splitlines()
    assert len([json.loads(line) for line in lines]) > 36
    archive = zipfile.ZipFile(io.BytesIO(httpx.get(f"{base}/export.csv").content))
    assert {"runs.csv", "rounds.csv", "tokens.csv"} <= {Path(name).name for name in archive.namelist()}
    stored = served.log.load(comparison_id)
    assert stored is not None
    run = httpx.get(f"{served.url}/api/runs/{stored.lanes['sd'].run_id}/export.json")
    assert run.status_code == 200
    assert httpx.get(f"{served.url}/api/runs/nothing/export.json").status_code == 404
    assert httpx.get(f"{base}/export.exe").status_code == 400


@pytest.fixture(scope="module")
def client(served: ServedPage) -> Client:
    return Client(served.url, verbose=False)


def test_compare_is_the_only_public_endpoint(client: Client) -> None:
    endpoints = client.view_api(return_format="dict")
    assert isinstance(endpoints, dict)
    assert list(endpoints["named_endpoints"]) == ["/compare"]
    assert endpoints["unnamed_endpoints"] == {}


def test_compare_streams_lanes_with_text_ids_and_figures(client: Client, served: ServedPage) -> None:
    job = client.submit("hello", {"max_new_tokens": 9, "modes": ["ar", "ssd"], "seed": 3}, api_name="/compare")
    last = job.result(timeout=20)
    assert set(last["lanes"]) == {"ar", "ssd"}
    assert len(last["lanes"]["ssd"]["token_ids"]) == 9
    assert last["lanes"]["ar"]["text"] == last["lanes"]["ssd"]["text"]
    assert last["lanes"]["ar"]["figures"]["num_tokens"] == 9
    assert last["lanes"]["ar"]["figures"]["draft_acceptance_rate"] is None
    stored = served.log.load(last["comparison_id"])
    assert stored is not None
    assert stored.settings["seed"] == 3


def test_compare_needs_no_settings(client: Client) -> None:
    assert set(client.predict("hello", api_name="/compare")["lanes"]) == {"ar", "sd", "ssd"}


@pytest.mark.parametrize(
    ("message", "settings", "error"),
    [
        ("  ", None, "The prompt is empty"),
        ("hi", {"lookahead": 99}, "lookahead is 99: give a whole number from 1 to 16"),
        ("hi", {"lookahed": 3}, "setting 'lookahed' is 3: known settings"),
        (7, None, "the prompt is 7"),
    ],
)
def test_compare_refuses_bad_input_with_the_same_words(
    client: Client, served: ServedPage, message: Any, settings: Any, error: str
) -> None:
    before = served.log.history("", None, None, None)["total"]
    with pytest.raises(AppError, match=error):
        client.predict(message, settings, api_name="/compare")
    assert served.log.history("", None, None, None)["total"] == before


def test_a_caller_that_goes_away_stops_its_comparison(tmp_path: Path) -> None:
    with EchoEngine(Script(rate=50.0)) as engine:
        engine.wait_ready(5)
        with served_page(engine, tmp_path / "saguaro.db") as page:
            job = Client(page.url, verbose=False).submit("hello", {"max_new_tokens": 5000}, api_name="/compare")
            while not job.outputs():
                pass
            (comparison,) = page.service.active()
            job.cancel()
            assert comparison.wait_ended(5)
            assert comparison.lanes["ar"].phase == "stopped"


def test_a_password_covers_every_route(tmp_path: Path) -> None:
    with EchoEngine(Script(rate=None)) as engine:
        engine.wait_ready(5)
        with served_page(engine, tmp_path / "saguaro.db", auth=("ana", "päss")) as page:
            for path in ("/", "/api/status", "/ui/stage.js", "/gradio_api/info", "/gradio_api/heartbeat/x", "/config"):
                assert httpx.get(page.url + path).status_code == 401
                assert httpx.get(page.url + path, auth=("ana", "wrong")).status_code == 401
            for header in ("Basic €", "Basic é", "Basic =", "Bearer YW5h"):
                headers = {b"Authorization": header.encode()}
                assert httpx.get(f"{page.url}/api/status", headers=headers).status_code == 401
            assert httpx.post(f"{page.url}/gradio_api/cancel", json={}).status_code == 401
            assert httpx.get(f"{page.url}/api/status", auth=("ana", "päss")).status_code == 200


def test_the_api_takes_the_password_in_the_address_only(tmp_path: Path) -> None:
    with EchoEngine(Script(rate=None)) as engine:
        engine.wait_ready(5)
        with served_page(engine, tmp_path / "saguaro.db", auth=("me", "secret")) as page:
            client = Client(page.url.replace("://", "://me:secret@"), verbose=False)
            answer = client.predict("hi", {"max_new_tokens": 5, "modes": ["ar"]}, api_name="/compare")
            assert answer["lanes"]["ar"]["status"] == "finished"
            client.close()
            with pytest.raises(AuthenticationError):
                Client(page.url, auth=("me", "secret"), verbose=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"port": 99_999}, "port is 99999"), ({"port": -1}, "port is -1"), ({"host": "0.0.0.0"}, "give --auth")],
)
def test_server_settings_are_judged(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ServerSettings(**values)
