"""Our own HTTP routes beside the page: the engine's status, the stream of a comparison, and the exports.

A comparison streams as server-sent events with what lies beyond the reader's cursor, so a slow or returning reader
gets larger steps, never a backlog, and the cost of an update does not grow with the answer.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from saguaro_core.config import MODES, Mode
from saguaro_core.errors import InvalidRequest
from saguaro_core.status import EngineStatus
from storage import ExportFile, NotStored, Selection, StorageError
from ui.comparisons import Comparison, ComparisonService
from ui.lane import Cursor
from ui.run_log import StoredRunLog

UPDATE_SECONDS = 0.125
KEEP_ALIVE_SECONDS = 10.0


def status_data(status: EngineStatus, log_problem: str | None) -> dict[str, Any]:
    """The engine's status, and why the log does not follow, as plain JSON data."""
    return {**asdict(status), "log_problem": log_problem}


def parse_cursors(text: str) -> dict[Mode, Cursor]:
    """Read `ar.120.60.80,sd.0.0.0`; anything unreadable starts from the beginning."""
    cursors: dict[Mode, Cursor] = {}
    for part in filter(None, text.split(",")):
        name, *numbers = part.split(".")
        mode = next((m for m in MODES if m == name), None)
        if mode is None or len(numbers) != 3 or not all(n.isdecimal() and len(n) < 10 for n in numbers):
            return {}
        cursors[mode] = (int(numbers[0]), int(numbers[1]), int(numbers[2]))
    return cursors


def format_cursors(cursors: dict[Mode, Cursor]) -> str:
    return ",".join(f"{mode}.{tokens}.{rounds}.{spans}" for mode, (tokens, rounds, spans) in cursors.items())


def build_routes(service: ComparisonService, log: StoredRunLog | None) -> APIRouter:
    """The routes over one service; without a store there are no exports."""
    router = APIRouter(prefix="/api")

    @router.get("/status")
    async def status() -> JSONResponse:
        problem = log.problem if log is not None else None
        return JSONResponse(status_data(service.engine.status, problem), headers={"Cache-Control": "no-store"})

    @router.get("/comparisons/{comparison_id}/events")
    async def events(comparison_id: str, request: Request, cursor: str = "") -> StreamingResponse:
        try:
            comparison = await run_in_threadpool(service.find, comparison_id)
        except StorageError as error:
            raise HTTPException(503, str(error)) from error
        if comparison is None:
            raise HTTPException(404, f"comparison {comparison_id!r} is unknown: it may have been deleted.")
        cursors = parse_cursors(request.headers.get("last-event-id", cursor))
        stream = event_stream(comparison, cursors, lambda: service.num_ahead(comparison))
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    if log is not None:
        _add_exports(router, log)
    return router


def _add_exports(router: APIRouter, log: StoredRunLog) -> None:
    @router.get("/comparisons/{comparison_id}/export.{form}")
    def comparison(comparison_id: str, form: str) -> StreamingResponse:
        return _download(log, Selection(comparison_ids=(comparison_id,)), form)

    @router.get("/runs/{run_id}/export.{form}")
    def run(run_id: str, form: str) -> StreamingResponse:
        return _download(log, Selection(run_ids=(run_id,)), form)


def _download(log: StoredRunLog, selection: Selection, form: str) -> StreamingResponse:
    try:
        file: ExportFile = log.export(selection, form)
    except NotStored as error:
        raise HTTPException(404, str(error)) from error
    except StorageError as error:
        raise HTTPException(503, str(error)) from error
    except InvalidRequest as error:
        raise HTTPException(400, str(error)) from error
    headers = {"Content-Disposition": f'attachment; filename="{file.filename}"', "Cache-Control": "no-store"}
    return StreamingResponse(file.chunks, media_type=file.media_type, headers=headers)


async def event_stream(
    comparison: Comparison, cursors: dict[Mode, Cursor], num_ahead: Callable[[], int], pause: float = UPDATE_SECONDS
) -> AsyncIterator[str]:
    """Frames of one comparison: a header, then updates while it runs, then one `end`.

    While it waits, an `ahead` frame says that the number of comparisons before it changed.
    """
    yield _frame("header", comparison.header())
    sent_version, sent_ahead, idle = -1, 0, 0.0
    while True:
        ahead = num_ahead()
        if comparison.version != sent_version:
            update, cursors, sent_version = comparison.changes(cursors)
            yield _frame("update", {**update, "ahead": ahead}, format_cursors(cursors))
            sent_ahead, idle = ahead, 0.0
            if not update["active"]:
                yield _frame("end", {})
                return
        elif ahead != sent_ahead:
            yield _frame("ahead", {"ahead": ahead})
            sent_ahead, idle = ahead, 0.0
        elif idle >= KEEP_ALIVE_SECONDS:
            yield ": still here\n\n"
            idle = 0.0
        await asyncio.sleep(pause)
        idle += pause


def _frame(event: str, data: dict[str, Any], event_id: str | None = None) -> str:
    identity = f"id: {event_id}\n" if event_id else ""
    return f"event: {event}\n{identity}data: {json.dumps(data, separators=(',', ':'))}\n\n"
