"""Batches in one process: the real loops and messages around the real DraftServer, over runners with several rows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from local_engine import LocalRun

from saguaro_core.checks.local import LetterTokenizer, MemoryLink
from saguaro_core.config import GenerationRequest, Message, Mode, SamplingParams, SpeculationConfig
from saguaro_core.decoding.batch_link import BatchLink
from saguaro_core.decoding.batch_loop import BatchLoop
from saguaro_core.decoding.detokenizer import Detokenizer
from saguaro_core.decoding.loop import DecodingLoop
from saguaro_core.decoding.reporter import RunContext
from saguaro_core.decoding.sources import CandidateSource, DraftSource, NoDraft
from saguaro_core.decoding.stopping import AnswerBuilder
from saguaro_core.decoding.target import TargetSession, Verifier
from saguaro_core.draft import messages
from saguaro_core.draft.batch import BatchSpeculator
from saguaro_core.draft.messages import Begin, decode, encode
from saguaro_core.draft.process import DraftServer
from saguaro_core.draft.speculator import Speculator
from saguaro_core.events import Event, RunFinished
from saguaro_core.models.rows import RowRunner
from saguaro_core.models.runner import Runner

CHUNK = 4


@dataclass(frozen=True)
class Ask:
    """One sequence of a batch."""

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    should_stop: Callable[[], bool] = lambda: False
    on_events: Callable[[list[Event]], None] = lambda events: None


@dataclass
class BatchEngine:
    """Decodes a batch with a target and a draft runner.

    `on_sent` sees what goes to the draft before it does, with its number from 1; from message `deaf_from` on the draft
    does not hear.
    """

    target: Runner
    draft: Runner | None = None
    eos: frozenset[int] = frozenset()
    tokenizer: Any = field(default_factory=LetterTokenizer)
    on_sent: Callable[[int, messages.Message], None] = lambda number, message: None
    deaf_from: int | None = None
    num_sent: int = 0
    make_speculator: Callable[[Runner], Speculator] = Speculator
    timeout: float = 5.0
    clock: Callable[[], float] = time.perf_counter
    epoch: int = 0
    runs: list[LocalRun] = field(default_factory=list)
    link: MemoryLink = field(default_factory=MemoryLink)

    def run(self, mode: Mode, asks: Sequence[Ask], speculation: SpeculationConfig | None = None) -> list[LocalRun]:
        """Decode to the end; the runs in the order of the asks."""
        self.link, config = MemoryLink(), speculation or SpeculationConfig()
        server = DraftServer(self.link)
        if self.draft is not None:
            server.speculator = Speculator(self.draft)
            server.batch = BatchSpeculator(self.draft, self.make_speculator)
        batch = BatchLink(partial(self._send, server), self._receive, timeout=self.timeout, clock=self.clock)
        self.runs = []
        loops = {}
        for row, ask in enumerate(asks, start=1):
            loops[row] = self._loop(mode, row, ask, config, batch)
        BatchLoop(loops, self.target, batch).run()
        self.target.keep_rows(1)
        for run in self.runs:
            last = run.events[-1]
            assert isinstance(last, RunFinished)
            run.finished = last
        return self.runs

    def _send(self, server: DraftServer, message: messages.Message) -> None:
        self.num_sent += 1
        self.on_sent(self.num_sent, message)
        if self.deaf_from is None or self.num_sent < self.deaf_from:
            self.link.inbox.append(decode(*encode(message)))
            server.run()

    def _receive(self, timeout: float) -> messages.Message | None:
        return self.link.outbox.popleft() if self.link.outbox else None

    def _loop(self, mode: Mode, row: int, ask: Ask, config: SpeculationConfig, batch: BatchLink) -> DecodingLoop:
        events: list[Event] = []

        def emit(new: list[Event]) -> None:
            events.extend(new)
            ask.on_events(new)

        request = GenerationRequest(
            messages=(Message(role="user", content="x"),),
            mode=mode,
            sampling=ask.sampling,
            speculation=config,
            num_alternatives=2,
        )
        room = self.target.context_length - len(ask.prompt)
        run = RunContext(
            run_id=f"row-{row}",
            request=request,
            prompt=list(ask.prompt),
            target=TargetSession(RowRunner(self.target, row)),
            verifier=Verifier(ask.sampling, config.rule, self.target.vocabulary_size),
            answer=AnswerBuilder(
                Detokenizer(self.tokenizer), self.eos, ask.sampling.stop, ask.sampling.max_new_tokens, room
            ),
            eos_token_ids=self.eos,
            piece=str,
            emit=emit,
            should_stop=ask.should_stop,
            num_devices=2,
            prefill_chunk=CHUNK,
            clock=self.clock,
        )
        loop = DecodingLoop(run, self._source(request, ask, room, batch))
        finished: Any = None
        self.runs.append(LocalRun(finished, events, loop))
        return loop

    def _source(self, request: GenerationRequest, ask: Ask, room: int, batch: BatchLink) -> CandidateSource:
        if request.mode == "ar":
            return NoDraft()
        assert self.draft is not None
        self.epoch += 1
        begin = Begin(
            epoch=self.epoch,
            mode=request.mode,
            prompt_token_ids=tuple(ask.prompt),
            sampling=request.sampling,
            speculation=request.speculation,
            eos_token_ids=tuple(self.eos),
            lookahead=min(request.speculation.lookahead, min(request.sampling.max_new_tokens, room) - 1),
            prefill_chunk=CHUNK,
        )
        return DraftSource(
            begin,
            batch.send,
            lambda timeout: batch.receive(begin.epoch),
            token_ids=None,
            num_columns=self.draft.vocabulary_size,
            timeout=1.0,
            should_stop=ask.should_stop,
            clock=self.clock,
        )


def ragged(count: int, vocabulary: int, **sampling: Any) -> list[Ask]:
    """Prompts of different length and content, each with a limit and a seed of its own."""
    return [
        Ask(
            prompt=[(7 * row + 3 * place * place) % vocabulary for place in range(1 + (5 * row) % 11)],
            sampling=SamplingParams(max_new_tokens=9 + (5 * row) % 12, seed=row, **sampling),
        )
        for row in range(count)
    ]
