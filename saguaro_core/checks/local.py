"""Runs of the real decoding loop in this process, over any target and any way to reach a draft."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from saguaro_core.config import GenerationRequest, Mode, SamplingParams, SpeculationConfig
from saguaro_core.config import Message as Turn
from saguaro_core.decoding.detokenizer import Detokenizer
from saguaro_core.decoding.loop import DecodingLoop
from saguaro_core.decoding.reporter import RunContext
from saguaro_core.decoding.sources import CandidateSource, DraftSource, NoDraft
from saguaro_core.decoding.stopping import AnswerBuilder
from saguaro_core.decoding.target import TargetSession, Verifier
from saguaro_core.draft.link import Link
from saguaro_core.draft.messages import Begin, Message, Shutdown, decode, encode
from saguaro_core.draft.process import DraftServer
from saguaro_core.draft.speculator import Speculator
from saguaro_core.errors import ModelError
from saguaro_core.events import Event, RoundEvent, RunFinished
from saguaro_core.models.runner import Runner

_CHUNK = 256
_DRAFT_TIMEOUT = 30.0


class LetterTokenizer:
    """Stands in where a model has no texts: token i reads as one letter."""

    all_special_ids: ClassVar[list[int]] = []
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def convert_ids_to_tokens(self, ids: int) -> str:
        """One letter for each id."""
        return chr(ord("a") + ids % 26)

    def decode(self, token_ids: list[int], **kwargs: bool) -> str:
        """The letters of several ids."""
        return "".join(self.convert_ids_to_tokens(i) for i in token_ids)


class DraftEnd(Protocol):
    """How a run reaches its draft: `num_columns` is the width of the draft's head."""

    num_columns: int

    def send(self, message: Message) -> None:
        """Hand a message to the draft."""
        ...

    def receive(self, timeout: float) -> Message | None:
        """The draft's next message, or None."""
        ...


class MemoryLink(Link):
    """The draft's end of a link in memory. When nothing is left to read or to build it ends the server's loop."""

    def __init__(self) -> None:
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()

    def receive(self, timeout: float) -> Message | None:
        """What was sent last; Shutdown instead of a wait."""
        if self.inbox:
            return self.inbox.popleft()
        return None if timeout == 0 else Shutdown()

    def has_message(self) -> bool:
        """Whether something was sent and not read."""
        return bool(self.inbox)

    def send(self, *messages: Message) -> None:
        """Put messages, as they would arrive over a real link, where the other side finds them."""
        self.outbox.extend(decode(*encode(message)) for message in messages)

    def close(self) -> None:
        """Nothing is open."""


class LocalDraft:
    """The draft's server in this process: it works while a message is sent, so nothing overlaps."""

    def __init__(self, runner: Runner, device: str = "cpu") -> None:
        self.num_columns = runner.vocabulary_size
        self._link = MemoryLink()
        self._server = DraftServer(self._link)
        self._server.speculator = Speculator(runner, device=torch.device(device))

    def send(self, message: Message) -> None:
        """Hand a message over and let the draft work until nothing is left to do."""
        self._link.inbox.append(decode(*encode(message)))
        self._server.run()

    def receive(self, timeout: float) -> Message | None:
        """What the draft answered."""
        return self._link.outbox.popleft() if self._link.outbox else None


@dataclass(frozen=True, slots=True)
class Decoded:
    """One run that ended by itself."""

    finished: RunFinished
    rounds: tuple[RoundEvent, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What was said."""
        return self.finished.token_ids


@dataclass(slots=True)
class LocalEngine:
    """Decodes one run after another with a target runner and, for SD and SSD, a draft."""

    target: Runner
    draft: DraftEnd | None = None
    device: str = "cpu"
    num_devices: int = 1
    epoch: int = 0

    def run(
        self,
        mode: Mode,
        prompt: Sequence[int],
        sampling: SamplingParams,
        speculation: SpeculationConfig,
        verifier: Verifier | None = None,
    ) -> Decoded:
        """Decode to the token limit. Raises ModelError if the run failed."""
        self.epoch += 1
        request = GenerationRequest(
            messages=(Turn(role="user", content="x"),),
            mode=mode,
            sampling=sampling,
            speculation=speculation,
            num_alternatives=0,
        )
        rounds: list[RoundEvent] = []

        def keep(events: list[Event]) -> None:
            rounds.extend(event for event in events if isinstance(event, RoundEvent))

        loop = DecodingLoop(
            RunContext(
                run_id=f"check-{self.epoch}",
                request=request,
                prompt=list(prompt),
                target=TargetSession(self.target),
                verifier=verifier or self._verifier(sampling, speculation),
                answer=self._answer(len(prompt), sampling),
                eos_token_ids=frozenset(),
                piece=str,
                emit=keep,
                should_stop=lambda: False,
                num_devices=self.num_devices,
                prefill_chunk=_CHUNK,
            ),
            self._source(request, prompt),
        )
        finished = loop.run()
        if finished.status != "finished" or loop.source.waits != (mode != "ar"):
            raise ModelError(f"a run of {mode} ended {finished.status} ({finished.error or 'its draft was lost'}).")
        return Decoded(finished, tuple(rounds))

    def _verifier(self, sampling: SamplingParams, speculation: SpeculationConfig) -> Verifier:
        return Verifier(sampling, speculation.rule, self.target.vocabulary_size, self.device)

    def _answer(self, prompt_length: int, sampling: SamplingParams) -> AnswerBuilder[Any]:
        detokenizer = Detokenizer(LetterTokenizer())
        room = self.target.context_length - prompt_length
        return AnswerBuilder(detokenizer, frozenset(), (), sampling.max_new_tokens, room)

    def _source(self, request: GenerationRequest, prompt: Sequence[int]) -> CandidateSource:
        if request.mode == "ar" or self.draft is None:
            return NoDraft()
        begin = Begin(
            epoch=self.epoch,
            mode=request.mode,
            prompt_token_ids=tuple(prompt),
            sampling=request.sampling,
            speculation=request.speculation,
            eos_token_ids=(),
            lookahead=min(request.speculation.lookahead, request.sampling.max_new_tokens - 1),
            prefill_chunk=_CHUNK,
        )
        return DraftSource(
            begin,
            self.draft.send,
            self.draft.receive,
            token_ids=None,
            num_columns=self.draft.num_columns,
            timeout=_DRAFT_TIMEOUT,
            should_stop=lambda: False,
            clock=time.perf_counter,
        )
