"""The draft process with timers around the parts of a round; started by the benchmark's --profile."""

import logging

from saguaro_core.bench_profile_file import ProfileFile
from saguaro_core.bench_sections import Section, SectionClock, instrument
from saguaro_core.draft.branches import Branches
from saguaro_core.draft.child import connect_to_parent, disconnect
from saguaro_core.draft.link import Link
from saguaro_core.draft.messages import Begin, End, LoadDraft, Message, Verified
from saguaro_core.draft.process import DraftServer
from saguaro_core.draft.proposer import Proposer
from saguaro_core.draft.speculator import Speculator
from saguaro_core.models.native.runner import NativeRunner

# One call of it a round.
ROUND_LABEL = "answer: look up"
SECTIONS = (
    Section(Link, "_await_socket", "wait for the outcome"),
    Section(Link, "receive", "receive and decode"),
    Section(Link, "send", "send the speculation"),
    Section(DraftServer, "_handle", "answer: dispatch"),
    Section(Speculator, "verified", ROUND_LABEL),
    Section(Speculator, "_observe", "answer: remember the round"),
    Section(Speculator, "_answer", "answer: choose"),
    Section(Speculator, "_serve", "answer: serve the hit"),
    Section(Speculator, "_fall_back", "answer: fallback"),
    Section(Speculator, "_go_on", "answer: go on"),
    Section(Speculator, "_draft", "answer: draft tokens"),
    Section(Speculator, "_pack", "answer: pack"),
    Section(DraftServer, "_build", "build: dispatch"),
    Section(Speculator, "_extend_trunk", "build: extend the trunk"),
    Section(Speculator, "_plant", "build: choose the outcomes"),
    Section(Speculator, "_next_branches", "build: choose the branches"),
    Section(Speculator, "_grow", "build: branch passes"),
    Section(Branches, "next_batch", "build: lay out a pass"),
    Section(Proposer, "draw", "draw tokens"),
    Section(Proposer, "rank_scores", "rank candidates"),
)


class ProfiledDraftServer(DraftServer):
    """Profiles every request from its first outcome to its end, which is as many rounds as there are outcomes."""

    def __init__(self, link: Link, clock: SectionClock, file: ProfileFile) -> None:
        super().__init__(link)
        self._clock, self._file = clock, file
        self._is_first = False

    def _handle(self, message: Message) -> None:
        if isinstance(message, End):
            self._clock.stop()
            self._file.write(self._clock)
        if isinstance(message, Begin):
            self._is_first = True
        if isinstance(message, Verified) and self._is_first:
            self._is_first = False
            self._clock.start()
        super()._handle(message)
        if isinstance(message, LoadDraft) and self.speculator is not None:
            runner = type(self.speculator.runner)
            runner.forward = self._clock.timed_forward(runner.forward)  # type: ignore[method-assign]
            if issubclass(runner, NativeRunner):
                runner.forward_in_parts = self._clock.timed_parts(runner.forward_in_parts)  # type: ignore[method-assign]


def main() -> None:
    """Serve the parent process as the draft does."""
    logging.basicConfig(level=logging.WARNING, format="draft: %(levelname)s %(name)s: %(message)s")
    clock = SectionClock()
    instrument(clock, SECTIONS)
    file = ProfileFile.of_process("draft")
    link = connect_to_parent()
    try:
        ProfiledDraftServer(link, clock, file).run()
    finally:
        disconnect(link)


if __name__ == "__main__":
    main()
