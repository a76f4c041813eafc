"""Turns submitted requests into runs that can be decoded: the prompt's tokens, the draft behind a source, the loop."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from saguaro_core.config import EngineConfig
from saguaro_core.decoding.detokenizer import Detokenizer
from saguaro_core.decoding.loop import DecodingLoop
from saguaro_core.decoding.reporter import RunContext
from saguaro_core.decoding.sources import CandidateSource, DraftSource, NoDraft
from saguaro_core.decoding.stopping import AnswerBuilder
from saguaro_core.decoding.target import TargetSession, Verifier
from saguaro_core.draft.handle import DraftHandle
from saguaro_core.draft.messages import Begin, Message, Submit
from saguaro_core.errors import InvalidRequest
from saguaro_core.events import Event, RunStarted
from saguaro_core.models.build import TargetModel
from saguaro_core.models.chat import render_prompt
from saguaro_core.models.placement import ResolvedPlacement

_PIECES_KEPT = 65_536


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a run works: its place in the target's cache, and its way to the draft. `receive` takes the run's epoch
    and a time to wait.
    """

    session: TargetSession
    send: Callable[[Message], None]
    receive: Callable[[int, float], Message | None]
    timeout: float


class RunMaker:
    """Makes runs over one loaded pair; `emit` takes their events, should_stop(run_id) says whether one must end."""

    def __init__(
        self,
        target: TargetModel,
        draft: DraftHandle,
        config: EngineConfig,
        placement: ResolvedPlacement,
        *,
        emit: Callable[[list[Event]], None],
        should_stop: Callable[[str], bool],
    ) -> None:
        self.target, self.draft, self.config, self.placement = target, draft, config, placement
        self.context_length = min(config.max_length or target.info.context_length, target.info.context_length)
        self._emit, self._should_stop = emit, should_stop
        self._piece = lru_cache(_PIECES_KEPT)(lambda token_id: str(target.tokenizer.decode([token_id])))

    def make(self, submit: Submit, seat: Seat) -> tuple[RunStarted, DecodingLoop]:
        """The run's first event, and its loop. Raises InvalidRequest, DraftUnavailable, or StopRequested."""
        text, prompt_ids = render_prompt(self.target.tokenizer, submit.request.messages)
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise InvalidRequest(
                f"the prompt is {len(prompt_ids)} tokens long: with at least one token of answer the context of "
                f"{self.context_length} tokens cannot hold it. Shorten the prompt."
            )
        if not submit.request.reuse_prefix:
            seat.session.forget()
        source = self._source(submit, prompt_ids, room, seat)
        started = RunStarted(
            run_id=submit.run_id, started_at=time.time(), prompt=text, prompt_token_ids=tuple(prompt_ids)
        )
        return started, DecodingLoop(self._run_context(submit, list(prompt_ids), room, seat), source)

    def _run_context(self, submit: Submit, prompt_ids: list[int], room: int, seat: Seat) -> RunContext:
        sampling, target = submit.request.sampling, self.target
        return RunContext(
            run_id=submit.run_id,
            request=submit.request,
            prompt=prompt_ids,
            target=seat.session,
            verifier=Verifier(
                sampling,
                submit.request.speculation.rule,
                target.runner.vocabulary_size,
                self.placement.target.first,
            ),
            answer=AnswerBuilder(
                Detokenizer(target.tokenizer), target.eos_token_ids, sampling.stop, sampling.max_new_tokens, room
            ),
            eos_token_ids=target.eos_token_ids,
            piece=self._piece,
            emit=self._emit,
            should_stop=partial(self._should_stop, submit.run_id),
            num_devices=self.placement.num_devices,
            prefill_chunk=self.config.prefill_chunk,
        )

    def _source(self, submit: Submit, prompt_ids: tuple[int, ...], room: int, seat: Seat) -> CandidateSource:
        """The source of the request's mode. Raises DraftUnavailable: an AR run is never passed off as another mode."""
        request, should_stop = submit.request, partial(self._should_stop, submit.run_id)
        if request.mode == "ar":
            return NoDraft()
        self.draft.ensure_loaded(should_stop)
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
            reuse_prefix=request.reuse_prefix,
        )
        return DraftSource(
            begin,
            seat.send,
            partial(seat.receive, begin.epoch),
            token_ids=self.draft.token_ids,
            num_columns=self.draft.num_columns,
            timeout=seat.timeout,
            should_stop=should_stop,
            clock=time.perf_counter,
        )
