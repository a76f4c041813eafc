"""The engine process: holds the target and the draft process, decodes one queued run after another.

Run by the Engine client as `python -m saguaro_core.server`; not for hand use. Between two rounds it looks for
messages, so a stop takes effect within one round.
"""

import logging
import time
from collections import deque
from functools import lru_cache

from saguaro_core.config import EngineConfig, GenerationRequest
from saguaro_core.decoding.detokenizer import Detokenizer
from saguaro_core.decoding.loop import DecodingLoop
from saguaro_core.decoding.reporter import RunContext
from saguaro_core.decoding.sources import CandidateSource, DraftSource, NoDraft, StopRequested
from saguaro_core.decoding.stopping import AnswerBuilder
from saguaro_core.decoding.target import TargetSession, Verifier
from saguaro_core.draft.child import connect_to_parent
from saguaro_core.draft.handle import DraftHandle
from saguaro_core.draft.link import Link
from saguaro_core.draft.messages import Begin, Configure, LoadDraft, Message, Shutdown, Stop, Submit
from saguaro_core.errors import DraftUnavailable, InvalidRequest, SaguaroError, describe
from saguaro_core.events import Event, RunFinished, RunStarted
from saguaro_core.models.build import TargetModel, build_target, hardware_name, software_versions
from saguaro_core.models.chat import render_prompt
from saguaro_core.models.linear import has_fbgemm
from saguaro_core.models.placement import ResolvedPlacement, occupy, resolve_placement
from saguaro_core.status import EngineInfo, EngineState, EngineStatus

logger = logging.getLogger(__name__)

_IDLE_POLL_SECONDS = 1.0
_PIECES_KEPT = 65_536


class EngineServer:
    """Loads a pair and serves the app until it says Shutdown."""

    def __init__(self, link: Link, config: EngineConfig) -> None:
        self.link, self.config = link, config
        self.queue: deque[Submit] = deque()
        self.is_shutting_down = False
        self._running: str | None = None
        self._stop_requested = False
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
            self.config.target, self.placement.target, self._progress, compile_shapes=self.config.compile_shapes
        )
        self.context_length = min(
            self.config.max_length or self.target.info.context_length, self.target.info.context_length
        )
        self._piece = lru_cache(_PIECES_KEPT)(lambda token_id: str(self.target.tokenizer.decode([token_id])))
        self._status("loading", f"Loading the draft {self.config.draft}")
        draft = self.placement.draft
        self.draft.start(
            LoadDraft(
                draft=self.config.draft,
                target=self.config.target,
                device=draft.first,
                cores=draft.cores,
                compile_shapes=self.config.compile_shapes,
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
            context_length=self.context_length,
            num_devices=self.placement.num_devices,
            hardware=hardware_name(),
            versions=software_versions(),
            notes=tuple(notes),
        )

    # -- serving ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Decode queued runs in order until told to end."""
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
                self.queue.append(message)
            case Stop(run_id=run_id) if run_id == self._running:
                self._stop_requested = True
            case Stop(run_id=run_id):
                self._drop(run_id)
            case Shutdown():
                self.is_shutting_down = self._stop_requested = True
            case _:
                logger.warning("ignored a message: %s", type(message).__name__)

    def _drop(self, run_id: str) -> None:
        """Stop a run that still waits in the queue."""
        waiting = [submit for submit in self.queue if submit.run_id == run_id]
        for submit in waiting:
            self.queue.remove(submit)
            self.link.send(RunFinished.unstarted(run_id))

    def _should_stop(self) -> bool:
        self._poll(0.0)
        return self._stop_requested

    def _decode(self, submit: Submit) -> None:
        self._running, self._stop_requested = submit.run_id, False
        try:
            prompt, loop = self._prepare(submit)
        except StopRequested:
            self.link.send(RunFinished.unstarted(submit.run_id))
        except Exception as error:  # The run ends with its reason; the engine goes on.
            if not isinstance(error, SaguaroError):
                logger.exception("run %s could not start", submit.run_id)
            self.link.send(RunFinished.unstarted(submit.run_id, describe(error)))
        else:
            self.link.send(prompt)
            loop.run()
            if submit.request.mode != "ar":
                self.draft.recover(was_lost=isinstance(loop.source, NoDraft))
        finally:
            self._running = None

    def _prepare(self, submit: Submit) -> tuple[RunStarted, DecodingLoop]:
        request = submit.request
        text, prompt_ids = render_prompt(self.target.tokenizer, request.messages)
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise InvalidRequest(
                f"the prompt is {len(prompt_ids)} tokens long: with at least one token of answer the context of "
                f"{self.context_length} tokens cannot hold it. Shorten the prompt."
            )
        source = self._source(request, prompt_ids, room)
        started = RunStarted(
            run_id=submit.run_id, started_at=time.time(), prompt=text, prompt_token_ids=tuple(prompt_ids)
        )
        return started, DecodingLoop(self._run_context(submit, list(prompt_ids), room), source)

    def _run_context(self, submit: Submit, prompt_ids: list[int], room: int) -> RunContext:
        sampling, target = submit.request.sampling, self.target
        return RunContext(
            run_id=submit.run_id,
            request=submit.request,
            prompt=prompt_ids,
            target=TargetSession(target.runner),
            verifier=Verifier(
                sampling, submit.request.speculation.rule, target.runner.vocabulary_size, target.runner.device
            ),
            answer=AnswerBuilder(
                Detokenizer(target.tokenizer), target.eos_token_ids, sampling.stop, sampling.max_new_tokens, room
            ),
            eos_token_ids=target.eos_token_ids,
            piece=lambda token_id: self._piece(token_id),
            emit=self._emit,
            should_stop=self._should_stop,
            num_devices=self.placement.num_devices,
            prefill_chunk=self.config.prefill_chunk,
        )

    def _emit(self, events: list[Event]) -> None:
        self.link.send(*events)

    def _source(self, request: GenerationRequest, prompt_ids: tuple[int, ...], room: int) -> CandidateSource:
        """The source of the request's mode. Raises DraftUnavailable: an AR run is never passed off as another mode."""
        if request.mode == "ar":
            return NoDraft()
        self.draft.ensure_loaded(self._should_stop)
        limit = min(request.sampling.max_new_tokens, room)
        begin = Begin(
            epoch=self.draft.next_epoch(),
            mode=request.mode,
            prompt_token_ids=tuple(prompt_ids),
            sampling=request.sampling,
            speculation=request.speculation,
            eos_token_ids=tuple(sorted(self.target.eos_token_ids)),
            lookahead=min(request.speculation.lookahead, limit - 1),
            prefill_chunk=self.config.prefill_chunk,
        )
        return DraftSource(
            begin,
            self.draft.send,
            self.draft.receive,
            token_ids=self.draft.token_ids,
            num_columns=self.draft.num_columns,
            timeout=self.config.draft_timeout,
            should_stop=self._should_stop,
            clock=time.perf_counter,
        )


def main() -> int:
    """Serve the parent process; the exit status is 1 when nothing could be loaded."""
    logging.basicConfig(level=logging.WARNING, format="engine: %(levelname)s %(name)s: %(message)s")
    link = connect_to_parent()
    try:
        configure = link.receive(60.0)
        return _load_and_serve(EngineServer(link, configure.config)) if isinstance(configure, Configure) else 1
    finally:
        link.close()


def _load_and_serve(server: EngineServer) -> int:
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
