"""The engine process with timers around the parts of a round; started by the benchmark's --profile."""

import logging
from typing import Any

from saguaro_core.bench_profile_file import ProfileFile
from saguaro_core.bench_sections import Section, SectionClock, instrument
from saguaro_core.config import EngineConfig
from saguaro_core.decoding.loop import DecodingLoop
from saguaro_core.decoding.reporter import Reporter
from saguaro_core.decoding.sources import DraftSource
from saguaro_core.decoding.stopping import AnswerBuilder
from saguaro_core.decoding.target import TargetSession, Verifier
from saguaro_core.draft.child import connect_to_parent, disconnect
from saguaro_core.draft.handle import DraftHandle
from saguaro_core.draft.link import Link
from saguaro_core.draft.messages import Configure
from saguaro_core.models.lean import LeanDecoderLayer
from saguaro_core.models.linear import FusedRMSNorm, HalfLinear
from saguaro_core.models.native import runner as native
from saguaro_core.server import EngineServer, load_and_serve

DRAFT_MODULE = "saguaro_core.bench_profile_draft"
# One call of it a round.
ROUND_LABEL = "commit the tokens"
SECTIONS = (
    Section(Link, "_await_socket", "wait for the draft"),
    Section(Link, "receive", "receive and decode"),
    Section(DecodingLoop, "propose", "take the proposal"),
    Section(DraftSource, "propose", "take the proposal"),
    Section(TargetSession, "verify", "prepare the forward"),
    Section(native, "run_layers", "forward: compiled layers", is_opaque=True),
    Section(native, "read_out", "forward: compiled head", is_opaque=True),
    Section(HalfLinear, "forward", "forward: linear layers"),
    Section(LeanDecoderLayer, "_attend", "forward: attention"),
    Section(FusedRMSNorm, "forward", "forward: norms"),
    Section(Verifier, "decide", "decide the outcome"),
    Section(DecodingLoop, "decide", ROUND_LABEL),
    Section(DraftSource, "update", "send the verdict", is_opaque=True),
    Section(DecodingLoop, "report", "report the round"),
    Section(Reporter, "_describe_tokens", "probabilities to show"),
    Section(AnswerBuilder, "push", "turn into text"),
    Section(Reporter, "flush", "emit the events", is_opaque=True),
    Section(EngineServer, "_should_stop", "look for a stop", is_opaque=True),
)


class ProfiledServer(EngineServer):
    """Profiles every run from its first round to its last."""

    def __init__(self, link: Link, config: EngineConfig, clock: SectionClock) -> None:
        super().__init__(link, config)
        self._clock = clock
        self.draft = DraftHandle(config.load_timeout, DRAFT_MODULE)

    def load(self) -> None:
        """Load the pair, and time the forwards of whatever runs the target."""
        super().load()
        runner = type(self.target.runner)
        runner.forward = self._clock.timed_forward(runner.forward)  # type: ignore[method-assign]


def profile_runs(clock: SectionClock, file: ProfileFile) -> None:
    """Start the clock when a run's prompt is read; stop it and write its sums when the run ends."""
    prefill, finish = DecodingLoop.prefill, DecodingLoop.finish

    def prefilled(loop: DecodingLoop) -> None:
        prefill(loop)
        clock.start()

    def finished(loop: DecodingLoop) -> Any:
        clock.stop()
        file.write(clock)
        return finish(loop)

    DecodingLoop.prefill = prefilled  # type: ignore[assignment, method-assign]
    DecodingLoop.finish = finished  # type: ignore[assignment, method-assign]


def main() -> int:
    """Serve the parent process as the engine does."""
    logging.basicConfig(level=logging.WARNING, format="engine: %(levelname)s %(name)s: %(message)s")
    clock = SectionClock()
    instrument(clock, SECTIONS)
    profile_runs(clock, ProfileFile.of_process("target"))
    link = connect_to_parent()
    try:
        configure = link.receive(60.0)
        if not isinstance(configure, Configure):
            return 1
        return load_and_serve(ProfiledServer(link, configure.config, clock))
    finally:
        disconnect(link)


if __name__ == "__main__":
    raise SystemExit(main())
