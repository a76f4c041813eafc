"""An engine in one process whose draft is the real DraftServer over a link in memory: failures travel as they do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from local_engine import LocalEngine

from saguaro_core.checks.local import MemoryLink
from saguaro_core.config import GenerationRequest
from saguaro_core.decoding.sources import CandidateSource, DraftSource, NoDraft
from saguaro_core.draft.messages import Begin, Message, decode, encode
from saguaro_core.draft.process import DraftServer
from saguaro_core.draft.speculator import Speculator


@dataclass
class ServedEngine(LocalEngine):
    """A LocalEngine around DraftServer; `speculator`, `link` and `begin` are those of the latest run."""

    timeout: float = 5.0
    clock: Callable[[], float] = field(default=lambda: 0.0)
    on_sent: Callable[[Message], None] = lambda message: None
    speculator: Speculator | None = None
    link: MemoryLink = field(default_factory=MemoryLink)

    def _source(
        self, request: GenerationRequest, prompt: Sequence[int], should_stop: Callable[[], bool]
    ) -> CandidateSource:
        if request.mode == "ar":
            return NoDraft()
        assert self.draft is not None
        token_ids = None if self.draft_token_ids is None else torch.tensor(self.draft_token_ids)
        link, server = self.link, DraftServer(self.link)
        server.speculator = self.speculator = Speculator(self.draft, token_ids)

        def send(message: Message) -> None:
            self.on_sent(message)
            link.inbox.append(decode(*encode(message)))
            server.run()

        limit = min(request.sampling.max_new_tokens, (self.context_length or self.target.context_length) - len(prompt))
        begin = Begin(
            epoch=self.epoch,
            mode=request.mode,
            prompt_token_ids=tuple(prompt),
            sampling=request.sampling,
            speculation=request.speculation,
            eos_token_ids=tuple(self.eos),
            lookahead=min(request.speculation.lookahead, limit - 1),
            prefill_chunk=4,
        )
        return DraftSource(
            begin,
            send,
            lambda timeout: link.outbox.popleft() if link.outbox else None,
            token_ids=token_ids,
            num_columns=self.draft.vocabulary_size,
            timeout=self.timeout,
            should_stop=should_stop,
            clock=self.clock,
        )
