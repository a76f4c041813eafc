"""The engine as the app sees it: a client of the engine process. Nothing here imports torch.

One thread owns the link: it delivers events in order and watches the process. If the process dies, every open run
still gets its RunFinished with what was said so far, and the process is started again.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Self

import zmq

from saguaro_core.batch_request import check_batch
from saguaro_core.config import EngineConfig, GenerationRequest
from saguaro_core.draft.child import Child
from saguaro_core.draft.messages import Configure, Message, Shutdown, Stop, Submit, SubmitBatch, encode
from saguaro_core.errors import EngineUnavailable, InvalidRequest, ModelError
from saguaro_core.events import Event, RunFinished
from saguaro_core.figures import FiguresAccumulator
from saguaro_core.open_run import EventListener, OpenRun
from saguaro_core.status import EngineInfo, EngineStatus

logger = logging.getLogger(__name__)

MODULE = "saguaro_core.server"
_POLL_MS = 200
_MOST_RESTARTS = 3

StatusListener = Callable[[EngineStatus], None]


class Engine:
    """Client of the engine process; thread-safe. Use it as a context manager, or call start and close."""

    def __init__(self, config: EngineConfig, *, on_status: StatusListener | None = None, module: str = MODULE) -> None:
        self.config, self._module = config, module
        self._on_status = on_status
        self._status = EngineStatus(state="starting", message="Starting")
        self._changed = threading.Condition()
        self._runs: dict[str, OpenRun] = {}
        self._closing = False
        self._num_restarts = 0
        self._thread: threading.Thread | None = None
        # Other threads hand messages to the link's owner through an in-process pair; the lock serialises them.
        self._outbox: zmq.Socket[bytes] | None = None
        self._outbox_lock = threading.Lock()
        self._child: Child | None = None

    @property
    def status(self) -> EngineStatus:
        """The newest status; its info is set once the engine is ready."""
        return self._status

    def start(self) -> None:
        """Start the processes and return at once; the status follows. Again is harmless."""
        if self._thread is not None:
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        address = f"inproc://engine-{id(self)}"
        inbox: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._outbox = context.socket(zmq.PAIR)
        inbox.rcvhwm = self._outbox.sndhwm = self._outbox.linger = 0  # No limit on messages, no wait at the end.
        inbox.bind(address)
        self._outbox.connect(address)
        self._thread = threading.Thread(target=self._own_link, args=(inbox,), name="engine-client", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> EngineInfo:
        """Block until the pair is loaded. Raises ModelError with the reason, or EngineUnavailable after `timeout`
        seconds.
        """
        with self._changed:
            settled = self._changed.wait_for(lambda: self._status.state in ("ready", "failed", "closed"), timeout)
            status = self._status
        if status.info is not None:
            return status.info
        if settled:
            raise ModelError(status.message)
        raise EngineUnavailable(
            f"the engine is not ready after {timeout:g} s ({status.message}): wait, or look at its log."
        )

    def submit(self, run_id: str, request: GenerationRequest, on_event: EventListener) -> None:
        """Queue a run; runs decode one at a time, first in, first out.

        on_event is called in order on the client's thread and gets exactly one RunFinished, last, whatever happens. A
        request that only the engine can judge ends as a failed run with its reason. Raises EngineUnavailable when the
        engine is not ready, InvalidRequest for a text that is no valid Unicode.
        """
        self._submit({run_id: request}, Submit(run_id=run_id, request=request), on_event)

    def submit_batch(self, requests: Mapping[str, GenerationRequest], on_event: EventListener) -> None:
        """Queue runs, by their ids, that are decoded together: 1 to 16 of one mode and one speculation.

        Events come as for runs alone, told apart by their run_id, and each run gets exactly one RunFinished. Raises
        InvalidRequest for what is no batch, and what submit raises.
        """
        check_batch(requests)
        runs = tuple(Submit(run_id=run_id, request=request) for run_id, request in requests.items())
        self._submit(requests, SubmitBatch(runs=runs), on_event)

    def run_batch(self, requests: Mapping[str, GenerationRequest]) -> Iterator[Event]:
        """Decode requests together and yield their events until the last run has ended. Raises what submit_batch does.

        Leaving the iterator early stops the runs.
        """
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.submit_batch(requests, events.put)
        return self._until_finished(set(requests), events)

    def _until_finished(self, run_ids: set[str], events: "queue.SimpleQueue[Event]") -> Iterator[Event]:
        try:
            while run_ids:
                event = events.get()
                if isinstance(event, RunFinished):
                    run_ids.discard(event.run_id)
                yield event
        finally:
            for run_id in run_ids:
                self.stop(run_id)

    def _submit(self, requests: Mapping[str, GenerationRequest], message: Message, on_event: EventListener) -> None:
        frames = _frames(message)
        info = self.status.info
        with self._changed:
            if self._status.state != "ready" or info is None:
                raise EngineUnavailable(
                    f"the engine is {self._status.state} ({self._status.message}): try again once it is ready."
                )
            for run_id, request in requests.items():
                self._runs[run_id] = OpenRun(on_event, FiguresAccumulator(request.mode, info.num_devices))
            self._send(frames)

    def stop(self, run_id: str) -> None:
        """End a queued or running run within one round; unknown ids are ignored."""
        if run_id in self._runs:
            self._send(_frames(Stop(run_id=run_id)))

    def process_id(self) -> int | None:
        """The engine process's id while it runs."""
        child = self._child
        return child.process.pid if child is not None and child.is_alive else None

    def close(self) -> None:
        """End both processes; open runs, those in the queue too, end as stopped by the user. Idempotent."""
        if self._thread is None or self._closing:
            return
        self._closing = True
        self._send(_frames(Shutdown()))
        self._thread.join()
        with self._outbox_lock:
            if self._outbox is not None:
                self._outbox.close()
                self._outbox = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the thread that owns the link ------------------------------------------------------------------------------

    def _send(self, frames: list[bytes]) -> None:
        # Without waiting: once the link's owner has ended nobody takes the message, and a plain send would hang.
        with self._outbox_lock, contextlib.suppress(zmq.Again):
            if self._outbox is not None:
                self._outbox.send_multipart(frames, zmq.NOBLOCK)

    def _own_link(self, inbox: "zmq.Socket[bytes]") -> None:
        try:
            while not self._closing and self._serve_process(inbox):
                self._num_restarts += 1
        except Exception as error:  # A fault of ours must still end every run.
            logger.exception("the engine client failed")
            self._set_status(EngineStatus(state="failed", message=f"the engine client failed: {error}"))
        finally:
            # The status first: from then on no run is accepted that nobody would end.
            if self._closing:
                self._set_status(EngineStatus(state="closed", message="Closed"))
            self._end_runs(None if self._closing else self._status.message)
            inbox.close()

    def _serve_process(self, inbox: "zmq.Socket[bytes]") -> bool:
        """Run one engine process to its end; whether another one should follow."""
        while inbox.poll(0):  # What is here was meant for the process before, and its runs have ended.
            inbox.recv_multipart()
        child = self._child = Child.spawn(self._module)
        try:
            child.link.send(Configure(config=self.config))
            self._relay(child, inbox)
            return self._judge_end(child)
        finally:
            child.close()

    def _relay(self, child: Child, inbox: "zmq.Socket[bytes]") -> None:
        """Pass messages both ways until the process ends or the client closes."""
        poller = zmq.Poller()
        poller.register(inbox, zmq.POLLIN)
        poller.register(child.link.socket, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(_POLL_MS))
            if inbox in ready:
                child.link.send_frames(inbox.recv_multipart())
            was_alive = child.is_alive  # Asked first: what it sent before it died is still to be delivered.
            if not self._drain(child) and not was_alive:
                return

    def _drain(self, child: Child) -> bool:
        """Deliver all messages that are here; whether there were any."""
        message = child.link.receive(0.0)
        found = message is not None
        while message is not None:
            self._deliver(message)
            message = child.link.receive(0.0)
        return found

    def _judge_end(self, child: Child) -> bool:
        """Say what became of the process and end its runs; whether it is to be started again."""
        if self._closing:
            return False
        if self._status.state == "failed":
            self._end_runs(self._status.message)
            return False
        reason = f"the engine process {child.describe_end()}."
        logger.error(reason)
        goes_on = self._status.state == "ready" and self._num_restarts < _MOST_RESTARTS
        # The status first: whoever hears of a run's end can wait for the next start.
        if goes_on:
            self._set_status(EngineStatus(state="starting", message=f"{reason} Starting it again"))
        else:
            self._set_status(EngineStatus(state="failed", message=f"{reason} Restart the application."))
        self._end_runs(reason)
        return goes_on

    def _deliver(self, message: Message) -> None:
        if isinstance(message, EngineStatus):
            self._set_status(message)
            return
        run_id = getattr(message, "run_id", None)
        run = self._runs.get(run_id) if run_id is not None else None
        if run is None:
            return
        event: Event = message  # type: ignore[assignment]
        run.take(event)
        if isinstance(event, RunFinished):
            del self._runs[event.run_id]
        self._call(run.listener, event)

    def _end_runs(self, error: str | None) -> None:
        with self._changed:
            runs, self._runs = self._runs, {}
        for run_id, run in runs.items():
            self._call(run.listener, run.cut(run_id, error))

    def _set_status(self, status: EngineStatus) -> None:
        with self._changed:
            self._status = status
            self._changed.notify_all()
        if self._on_status is not None:
            try:
                self._on_status(status)
            except Exception:
                logger.exception("a status listener failed")

    def _call(self, listener: EventListener, event: Event) -> None:
        try:
            listener(event)
        except Exception:
            logger.exception("an event listener failed")


def _frames(message: Message) -> list[bytes]:
    """A message as it travels. Raises InvalidRequest for half of a surrogate pair, which JSON can bring in."""
    try:
        return list(encode(message))
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"a text has {error.object[error.start]!r} at position {error.start}, which is half a character: remove it."
        ) from error
