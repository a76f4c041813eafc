"""The whole engine in one process: the real loop, source, speculator and messages, without processes or links."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from saguaro_core.checks.local import LetterTokenizer
from saguaro_core.config import GenerationRequest, Message, Mode, SamplingParams, SpeculationConfig
from saguaro_core.decoding.detokenizer import Detokenizer
from saguaro_core.decoding.loop import DecodingLoop
from saguaro_core.decoding.reporter import RunContext
from saguaro_core.decoding.sources import CandidateSource, DraftSource, NoDraft
from saguaro_core.decoding.stopping import AnswerBuilder
from saguaro_core.decoding.target import TargetSession, Verifier
from saguaro_core.draft import messages
from saguaro_core.draft.messages import Begin, End, Ended, Verified, decode, encode
from saguaro_core.draft.speculator import Speculator
from saguaro_core.events import Event, RoundEvent, RunFinished, TokenEvent
from saguaro_core.models.runner import Runner
from saguaro_core.verification import Outcome

ALL_PASSES = 10_000


class LocalDraft:
    """A draft process without the process; `passes(round)` says how many build steps it gets before the outcome
    arrives.
    """

    def __init__(self, speculator: Speculator, passes: Callable[[int], int] = lambda number: ALL_PASSES) -> None:
        self.speculator, self.passes = speculator, passes
        self.outbox: deque[messages.Message] = deque()

    def send(self, message: messages.Message) -> None:
        message = decode(*encode(message))
        match message:
            case Begin():
                self._answer(self.speculator.begin(message))
            case Verified():
                outcome = Outcome(message.accepted, message.bonus_token_id)
                self._answer(
                    self.speculator.verified(message.round_index, outcome, message.lookahead, message.verify_seconds)
                )
            case End():
                self.outbox.append(Ended(epoch=message.epoch, spans=self.speculator.end()))
            case _:
                raise AssertionError(message)

    def _answer(self, speculation: messages.Speculation) -> None:
        self.outbox.append(decode(*encode(speculation)))
        for _ in range(self.passes(speculation.round_index)):
            if not self.speculator.build_step():
                break

    def receive(self, timeout: float) -> messages.Message | None:
        return self.outbox.popleft() if self.outbox else None


@dataclass
class LocalRun:
    """One decoded run and everything it emitted."""

    finished: RunFinished
    events: list[Event]
    loop: DecodingLoop

    @property
    def ids(self) -> tuple[int, ...]:
        return self.finished.token_ids

    @property
    def rounds(self) -> list[RoundEvent]:
        return [event for event in self.events if isinstance(event, RoundEvent)]

    @property
    def tokens(self) -> list[TokenEvent]:
        return [event for event in self.events if isinstance(event, TokenEvent)]


@dataclass
class LocalEngine:
    """Decodes with a target runner and, for SD and SSD, a draft runner.

    With `is_warm` the caches outlive a run, as they do in the product; else each run starts cold.
    """

    target: Runner
    draft: Runner | None = None
    draft_token_ids: Sequence[int] | None = None
    eos: frozenset[int] = frozenset()
    tokenizer: Any = field(default_factory=LetterTokenizer)
    passes: Callable[[int], int] = lambda number: ALL_PASSES
    context_length: int | None = None
    num_alternatives: int = 2
    epoch: int = 0
    is_warm: bool = False
    session: TargetSession | None = None
    kept: Speculator | None = None

    def run(
        self,
        mode: Mode,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        speculation: SpeculationConfig | None = None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_events: Callable[[list[Event]], None] = lambda events: None,
    ) -> LocalRun:
        self.epoch += 1
        sampling, speculation = sampling or SamplingParams(), speculation or SpeculationConfig()
        request = GenerationRequest(
            messages=(Message(role="user", content="x"),),
            mode=mode,
            sampling=sampling,
            speculation=speculation,
            num_alternatives=self.num_alternatives,
        )
        events: list[Event] = []
        if self.session is None or not self.is_warm:
            self.session = TargetSession(self.target)

        def emit(new: list[Event]) -> None:
            events.extend(new)
            on_events(new)

        context = self.context_length or self.target.context_length
        run = RunContext(
            run_id=f"run-{self.epoch}",
            request=request,
            prompt=list(prompt),
            target=self.session,
            verifier=Verifier(sampling, speculation.rule, self.target.vocabulary_size),
            answer=AnswerBuilder(
                Detokenizer(self.tokenizer), self.eos, sampling.stop, sampling.max_new_tokens, context - len(prompt)
            ),
            eos_token_ids=self.eos,
            piece=lambda token_id: str(token_id),
            emit=emit,
            should_stop=should_stop,
            num_devices=2,
            prefill_chunk=4,
        )
        loop = DecodingLoop(run, self._source(request, prompt, should_stop))
        return LocalRun(loop.run(), events, loop)

    def _source(
        self, request: GenerationRequest, prompt: Sequence[int], should_stop: Callable[[], bool]
    ) -> CandidateSource:
        if request.mode == "ar":
            return NoDraft()
        assert self.draft is not None
        token_ids = None if self.draft_token_ids is None else torch.tensor(self.draft_token_ids)
        if self.kept is None or not self.is_warm:
            self.kept = Speculator(self.draft, token_ids)
        local = LocalDraft(self.kept, self.passes)
        begin = Begin(
            epoch=self.epoch,
            mode=request.mode,
            prompt_token_ids=tuple(prompt),
            sampling=request.sampling,
            speculation=request.speculation,
            eos_token_ids=tuple(self.eos),
            lookahead=min(request.speculation.lookahead, request.sampling.max_new_tokens - 1),
            prefill_chunk=4,
        )
        return DraftSource(
            begin,
            local.send,
            local.receive,
            token_ids=token_ids,
            num_columns=self.draft.vocabulary_size,
            timeout=5.0,
            should_stop=should_stop,
            clock=time.perf_counter,
        )
