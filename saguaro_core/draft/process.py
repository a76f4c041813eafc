"""The draft process: loads the draft, answers outcomes at once, builds the cache while nothing is asked.

Run by the engine as `python -m saguaro_core.draft.process`; not for hand use.
"""

import logging
from functools import partial

import torch

from saguaro_core.draft.batch import BatchSpeculator
from saguaro_core.draft.child import connect_to_parent, disconnect
from saguaro_core.draft.interruption import build_job, settle
from saguaro_core.draft.link import Link
from saguaro_core.draft.messages import (
    BatchTurn,
    Begin,
    DraftFailed,
    DraftLoaded,
    DraftSpan,
    End,
    Ended,
    LoadDraft,
    Message,
    Shutdown,
    Speculation,
    Verified,
)
from saguaro_core.draft.speculator import Speculator
from saguaro_core.errors import SaguaroError, describe
from saguaro_core.models.build import build_draft
from saguaro_core.models.placement import DevicePlan, occupy
from saguaro_core.models.steps import Job
from saguaro_core.verification import Outcome

logger = logging.getLogger(__name__)

_IDLE_POLL_SECONDS = 60.0


class DraftServer:
    """Serves one engine until it says Shutdown. A request that fails is reported and does not end the process."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.speculator: Speculator | None = None
        self.batch: BatchSpeculator | None = None
        self.epoch: int | None = None
        self._unfinished: Job[bool] | None = None

    def run(self) -> None:
        """Between two parts of a forward look for a message; without work wait for one."""
        while True:
            has_work = any(worker is not None and worker.is_building for worker in (self.speculator, self.batch))
            message = self.link.receive(0.0 if has_work else _IDLE_POLL_SECONDS)
            if isinstance(message, Shutdown):
                return
            try:
                if message is not None:
                    self._handle(message)
                elif has_work:
                    self._build()
            except Exception as error:  # The engine must hear of it, whatever it is.
                self._fail(error)

    def _build(self) -> None:
        """One step of what is under construction: of a run alone, which a message interrupts, or of a batch."""
        if self.speculator is not None and self.speculator.is_building:
            job, self._unfinished = self._unfinished or build_job(self.speculator), None
            if not job.go_on(lambda: not self.link.has_message()):
                self._unfinished = job
        if self.batch is not None and self.batch.is_building:
            self.batch.build_step()

    def _drop_unfinished(self) -> None:
        if self._unfinished is not None:
            self._unfinished.drop()
            self._unfinished = None

    def _handle(self, message: Message) -> None:
        if isinstance(message, LoadDraft):
            self._load(message)
            return
        speculator = self.speculator
        if speculator is None:
            raise SaguaroError("no draft is loaded.")
        match message:
            case Begin():
                self._drop_unfinished()
                self.epoch = message.epoch
                self.link.send(speculator.begin(message))
            case Verified() if message.epoch == self.epoch:
                self.link.send(self._verified(speculator, message))
            case End():
                spans: tuple[DraftSpan, ...] = ()
                if message.epoch == self.epoch:
                    self._drop_unfinished()
                    spans, self.epoch = speculator.end(), None
                self.link.send(Ended(epoch=message.epoch, spans=spans))
            case BatchTurn() if self.batch is not None:
                answer = self.batch.take(message)
                if answer is not None:
                    self.link.send(answer)
            case _:
                logger.info("ignored %s of another epoch", type(message).__name__)

    def _verified(self, speculator: Speculator, message: Verified) -> Speculation:
        outcome = Outcome(message.accepted, message.bonus_token_id)
        job, self._unfinished = self._unfinished, None
        if job is not None:
            settle(speculator, job, outcome, message.lookahead)
        return speculator.verified(message.round_index, outcome, message.lookahead, message.verify_seconds)

    def _load(self, message: LoadDraft) -> None:
        plan = DevicePlan((message.device,), message.cores)
        occupy(plan)
        draft = build_draft(
            message.draft,
            target_name=message.target,
            plan=plan,
            compile_shapes=message.compile_shapes,
            cpu_weights=message.cpu_weights,
        )
        self._drop_unfinished()
        device = torch.device(message.device)
        make_speculator = partial(Speculator, token_ids=draft.token_ids, device=device)
        self.speculator = make_speculator(draft.runner)
        self.batch = BatchSpeculator(draft.runner, partial(make_speculator, experience=self.speculator.experience))
        token_ids = () if draft.token_ids is None else tuple(draft.token_ids.tolist())
        self.link.send(DraftLoaded(info=draft.info, token_ids=token_ids, num_columns=draft.runner.vocabulary_size))

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, SaguaroError):
            logger.exception("the draft failed")
        epoch, self.epoch = self.epoch, None
        self._drop_unfinished()
        if self.speculator is not None:
            self.speculator.end()
        self.link.send(DraftFailed(message=describe(error), epoch=epoch))


def main() -> None:
    """Serve the parent process."""
    logging.basicConfig(level=logging.WARNING, format="draft: %(levelname)s %(name)s: %(message)s")
    link = connect_to_parent()
    try:
        DraftServer(link).run()
    finally:
        disconnect(link)


if __name__ == "__main__":
    main()
