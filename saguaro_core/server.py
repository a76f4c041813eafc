"""The engine process: holds the target and the draft process, decodes one queued run after another.

Run by the Engine client as `python -m saguaro_core.server`; not for hand use. Between two rounds it looks for
messages, so a stop takes effect within one round. A batch takes one place in the queue, and each of its runs a seat.
"""

import logging
import time
from collections import deque

from saguaro_core.config import EngineConfig
from saguaro_core.decoding.batch_link import BatchLink
from saguaro_core.decoding.batch_loop import BatchLoop
from saguaro_core.decoding.loop import DecodingLoop
from saguaro_core.decoding.sources import NoDraft, StopRequested
from saguaro_core.decoding.target import TargetSession
from saguaro_core.draft.child import connect_to_parent, disconnect
from saguaro_core.draft.handle import DraftHandle
from saguaro_core.draft.link import Link
from saguaro_core.draft.messages import Configure, LoadDraft, Message, Shutdown, Stop, Submit, SubmitBatch
from saguaro_core.errors import DraftUnavailable, SaguaroError, describe
from saguaro_core.events import Event, RunFinished
from saguaro_core.models.build import TargetModel, build_target, hardware_name, software_versions
from saguaro_core.models.linear import has_fbgemm
from saguaro_core.models.placement import ResolvedPlacement, occupy, resolve_placement
from saguaro_core.models.rows import RowRunner
from saguaro_core.run_maker import RunMaker, Seat
from saguaro_core.status import EngineInfo, EngineState, EngineStatus

logger = logging.getLogger(__name__)

_IDLE_POLL_SECONDS = 1.0
# A batch has waited for the draft before its sources look: what is not there then does not come.
_LOOK_SECONDS = 0.1


class EngineServer:
    """Loads a pair and serves the app until it says Shutdown."""

    def __init__(self, link: Link, config: EngineConfig) -> None:
        self.link, self.config = link, config
        self.queue: deque[tuple[Submit, ...]] = deque()
        self.is_shutting_down = False
        self._running: set[str] = set()
        self._to_stop: set[str] = set()
        self.draft = DraftHandle(config.load_timeout)

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the target, then the draft in its own process. A draft that fails leaves AR usable. Raises
        SaguaroError.
        """
        self._status("loading", "Looking at the devices")
        self.placement: ResolvedPlacement = resolve_placement(self.config.placement)
        occupy(self.placement.target)
        self.target: TargetModel = build_target(
            self.config.target,
            self.placement.target,
            self._progress,
            compile_shapes=self.config.compile_shapes,
            cpu_weights=self.config.cpu_weights,
        )
        # Runs alone share one session, so that a chat's next turn starts from what the last one left in the cache.
        self.session = TargetSession(self.target.runner)
        self.maker = RunMaker(
            self.target, self.draft, self.config, self.placement, emit=self._emit, should_stop=self._should_stop
        )
        self._status("loading", f"Loading the draft {self.config.draft}")
        draft = self.placement.draft
        self.draft.start(
            LoadDraft(
                draft=self.config.draft,
                target=self.config.target,
                device=draft.first,
                cores=draft.cores,
                compile_shapes=self.config.compile_shapes,
                cpu_weights=self.config.cpu_weights,
            )
        )
        self._settle_draft()
        self._status("ready", "Ready")

    def _settle_draft(self) -> None:
        try:
            self.draft.wait_loaded()
        except DraftUnavailable as error:
            logger.warning("no draft: %s", error)

    def _progress(self, message: str, share: float | None) -> None:
        self._status("loading", message, share)

    def _status(self, state: EngineState, message: str, progress: float | None = None) -> None:
        info = self._info() if state == "ready" else None
        self.link.send(EngineStatus(state=state, message=message, progress=progress, info=info))

    def _info(self) -> EngineInfo:
        notes = list(self.placement.notes)
        if self.placement.target.is_cpu and not has_fbgemm():
            notes.append("fbgemm is missing here: plain float32 linears serve, and verification costs more.")
        return EngineInfo(
            target=self.target.info,
            draft=self.draft.info,
            draft_error=self.draft.error,
            context_length=self.maker.context_length,
            num_devices=self.placement.num_devices,
            hardware=hardware_name(),
            versions=software_versions(),
            notes=tuple(notes),
        )

    # -- serving ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Decode queued runs and batches in order until told to end."""
        while not self.is_shutting_down:
            self._poll(0.0 if self.queue else _IDLE_POLL_SECONDS)
            if self.queue and not self.is_shutting_down:
                self._decode(self.queue.popleft())

    def _poll(self, timeout: float) -> None:
        """Take in what the app sent; waits for the first message only."""
        message = self.link.receive(timeout)
        while message is not None:
            self._take(message)
            message = self.link.receive(0.0)

    def _take(self, message: Message) -> None:
        match message:
            case Submit():
                self.queue.append((message,))
            case SubmitBatch():
                self.queue.append(message.runs)
            case Stop(run_id=run_id) if run_id in self._running:
                self._to_stop.add(run_id)
            case Stop(run_id=run_id):
                self._drop(run_id)
            case Shutdown():
                self.is_shutting_down = True
            case _:
                logger.warning("ignored a message: %s", type(message).__name__)

    def _drop(self, run_id: str) -> None:
        """Stop a run that still waits in the queue."""
        for place, runs in enumerate(self.queue):
            others = tuple(submit for submit in runs if submit.run_id != run_id)
            if len(others) < len(runs):
                self.queue[place] = others
                self.link.send(RunFinished.unstarted(run_id))

    def _should_stop(self, run_id: str) -> bool:
        self._poll(0.0)
        return self.is_shutting_down or run_id in self._to_stop

    def _decode(self, runs: tuple[Submit, ...]) -> None:
        """Decode one run, or several together; all that were stopped in the queue leave none."""
        self._running = {submit.run_id for submit in runs}
        if len(runs) == 1:
            self._decode_alone(runs[0])
        elif runs:
            self._decode_together(runs)
        self._running, self._to_stop = set(), set()

    def _decode_alone(self, submit: Submit) -> None:
        draft = self.draft
        seat = Seat(self.session, draft.send, lambda epoch, t: draft.receive(t), self.config.draft_timeout)
        loop = self._start(submit, seat)
        if loop is not None:
            loop.run()
            self._settle([loop])

    def _decode_together(self, runs: tuple[Submit, ...]) -> None:
        """Decode a batch. Its runs use the cache rows from 1 on: row 0 keeps the text of runs alone."""
        draft, target = self.draft, self.target.runner
        link = BatchLink(draft.send, draft.receive, timeout=self.config.draft_timeout, clock=time.perf_counter)
        loops: dict[int, DecodingLoop] = {}
        for row, submit in enumerate(runs, start=1):
            session = TargetSession(RowRunner(target, row))
            seat = Seat(session, link.send, lambda epoch, t: link.receive(epoch), _LOOK_SECONDS)
            loop = self._start(submit, seat)
            if loop is not None:
                loops[row] = loop
        if loops:
            BatchLoop(loops, target, link).run()
            target.keep_rows(1)
            self._settle(list(loops.values()))

    def _start(self, submit: Submit, seat: Seat) -> DecodingLoop | None:
        """Announce a run; one that cannot start ends with its reason, and the engine goes on."""
        try:
            prompt, loop = self.maker.make(submit, seat)
        except StopRequested:
            self.link.send(RunFinished.unstarted(submit.run_id))
        except Exception as error:
            if not isinstance(error, SaguaroError):
                logger.exception("run %s could not start", submit.run_id)
            self.link.send(RunFinished.unstarted(submit.run_id, describe(error)))
        else:
            self.link.send(prompt)
            return loop
        return None

    def _settle(self, loops: list[DecodingLoop]) -> None:
        """Start the draft again if a run has lost it."""
        if any(loop.run_context.request.mode != "ar" for loop in loops):
            self.draft.recover(was_lost=any(isinstance(loop.source, NoDraft) for loop in loops))

    def _emit(self, events: list[Event]) -> None:
        self.link.send(*events)


def main() -> int:
    """Serve the parent process; the exit status is 1 when nothing could be loaded."""
    logging.basicConfig(level=logging.WARNING, format="engine: %(levelname)s %(name)s: %(message)s")
    link = connect_to_parent()
    try:
        configure = link.receive(60.0)
        return load_and_serve(EngineServer(link, configure.config)) if isinstance(configure, Configure) else 1
    finally:
        disconnect(link)


def load_and_serve(server: EngineServer) -> int:
    """Load the pair and serve until told to end; the exit status is 1 when nothing could be loaded."""
    try:
        try:
            server.load()
        except Exception as error:  # The user must hear of it, whatever it is: too little memory, say.
            if not isinstance(error, SaguaroError):
                logger.exception("the engine could not load")
            server.link.send(EngineStatus(state="failed", message=describe(error)))
            return 1
        server.serve()
        return 0
    finally:
        server.draft.close()


if __name__ == "__main__":
    raise SystemExit(main())
