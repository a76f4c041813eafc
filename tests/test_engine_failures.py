"""Processes that die, hang or fail in the middle of a run, and what an application leaves behind when it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from engine_runs import (
    STORY,
    EngineRun,
    draft_process,
    greedy,
    is_gone,
    only_child,
    run_to_end,
    start_batch,
    start_run,
    wait_until,
)
from local_engine import LocalEngine
from scripted import ScriptedRunner, hashed, mixed

from saguaro_core.config import EngineConfig, GenerationRequest, Mode, SamplingParams
from saguaro_core.decoding.sources import CandidateSource, DraftSource, NoDraft
from saguaro_core.draft.link import Link
from saguaro_core.draft.messages import Begin, Shutdown
from saguaro_core.draft.process import DraftServer
from saguaro_core.draft.speculator import Speculator
from saguaro_core.engine import Engine
from saguaro_core.errors import ModelError
from saguaro_core.events import Notice
from saguaro_core.status import EngineStatus

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")

NUM_TOKENS = 48


@pytest.fixture(scope="module")
def fragile(default_target_dir: Path) -> Iterator[Engine]:
    """An engine whose processes the tests may kill."""
    with Engine(EngineConfig(draft_timeout=2.0)) as engine:
        engine.wait_ready(300)
        yield engine


@pytest.fixture(scope="module")
def undisturbed(fragile: Engine) -> tuple[int, ...]:
    """The answer that every disturbed run must give, too."""
    return run_to_end(fragile, STORY, "ar", greedy(NUM_TOKENS)).ids


def assert_speculates(run: EngineRun) -> None:
    assert run.finished.status == "finished"
    assert not run.notices
    assert run.rounds[0].cache == "compulsory"
    assert {event.cache for event in run.rounds[1:]} <= {"hit", "miss"}
    assert sum(event.drafted for event in run.rounds) > 0


class TestLostDraft:
    @pytest.mark.parametrize(
        ("mode", "blow", "said"),
        [
            ("ssd", signal.SIGKILL, "was killed by signal 9"),
            ("sd", signal.SIGKILL, "was killed by signal 9"),
            ("ssd", signal.SIGSTOP, "did not answer within 2 s"),
        ],
    )
    def test_the_answer_goes_on_in_the_same_stream(
        self, fragile: Engine, undisturbed: tuple[int, ...], mode: Mode, blow: signal.Signals, said: str
    ) -> None:
        run = start_run(fragile, STORY, mode, greedy(NUM_TOKENS))
        run.wait_for_tokens(8)
        draft = draft_process(fragile)
        draft.send_signal(blow)
        assert run.wait(30).status == "finished"
        assert run.ids == undisturbed
        assert [token.index for token in run.tokens] == list(range(NUM_TOKENS))
        (notice,) = run.notices
        assert said in notice.message
        assert "The answer goes on without it" in notice.message
        last = run.rounds[-1]
        assert (last.drafted, last.cache, last.wait_ms) == (0, None, 0.0)
        longest = max(run.rounds, key=lambda event: event.wait_ms)
        (wait,) = [span for span in run.spans if (span.kind, span.round_index) == ("wait", longest.index)]
        assert wait.end - wait.start == pytest.approx(longest.wait_ms / 1e3)
        assert (longest.wait_ms > 1500) == (blow == signal.SIGSTOP)
        assert run.tokens[-1].origin == "target"
        # The next run is SSD again, on a new process.
        again = run_to_end(fragile, STORY, "ssd", greedy(NUM_TOKENS))
        assert again.ids == undisturbed
        assert_speculates(again)
        assert is_gone(draft)
        assert draft_process(fragile).pid != draft.pid

    def test_a_batch_goes_on_too_in_all_its_streams(self, fragile: Engine, undisturbed: tuple[int, ...]) -> None:
        runs = start_batch(fragile, [STORY] * 3, "ssd", [greedy(NUM_TOKENS - 8 * row) for row in range(3)])
        runs[0].wait_for_tokens(8)
        draft_process(fragile).kill()
        for row, run in enumerate(runs):
            assert run.wait(30).status == "finished"
            assert run.ids == undisturbed[: NUM_TOKENS - 8 * row]
            (notice,) = run.notices
            assert "was killed by signal 9" in notice.message
        assert_speculates(run_to_end(fragile, STORY, "ssd", greedy(NUM_TOKENS)))

    def test_a_draft_that_died_between_two_runs_is_back_for_the_next(
        self, fragile: Engine, undisturbed: tuple[int, ...]
    ) -> None:
        draft = draft_process(fragile)
        draft.kill()
        wait_until(lambda: is_gone(draft), 5)
        run = run_to_end(fragile, STORY, "ssd", greedy(NUM_TOKENS))
        assert run.ids == undisturbed
        assert_speculates(run)

    def test_a_run_that_waits_for_a_new_draft_can_be_stopped(self, fragile: Engine) -> None:
        draft = draft_process(fragile)
        draft.kill()
        wait_until(lambda: not draft.is_running() or draft.status() == psutil.STATUS_ZOMBIE, 5)
        run = start_run(fragile, STORY, "ssd", greedy(NUM_TOKENS))
        other = start_run(fragile, STORY, "ar", greedy(2))
        wait_until(lambda: psutil.Process(fragile.process_id()).children(), 5)
        fragile.stop(run.run_id)
        assert run.wait(2).status == "stopped"
        assert run.finished.token_ids == ()
        assert other.wait(10).status == "finished"
        assert_speculates(run_to_end(fragile, STORY, "ssd", greedy(NUM_TOKENS)))

    def test_a_stop_ends_a_run_whose_draft_hangs(self, fragile: Engine, undisturbed: tuple[int, ...]) -> None:
        run = start_run(fragile, STORY, "ssd", greedy(NUM_TOKENS))
        run.wait_for_tokens(4)
        draft_process(fragile).send_signal(signal.SIGSTOP)
        fragile.stop(run.run_id)
        finished = run.wait(10)
        assert (finished.status, finished.token_ids) == ("stopped", undisturbed[: len(finished.token_ids)])
        # Whether the hang was noticed or not, the next run gives the answer.
        assert run_to_end(fragile, STORY, "ssd", greedy(NUM_TOKENS)).ids == undisturbed
        assert_speculates(run_to_end(fragile, STORY, "ssd", greedy(NUM_TOKENS)))


class TestLostEngine:
    def test_a_killed_engine_ends_its_runs_and_starts_again(
        self, fragile: Engine, undisturbed: tuple[int, ...]
    ) -> None:
        running = start_run(fragile, STORY, "ssd", greedy(1024))
        waiting = start_run(fragile, STORY, "ar", greedy(4))
        running.wait_for_tokens(8)
        process_id, draft = fragile.process_id(), draft_process(fragile)
        assert process_id is not None
        os.kill(process_id, signal.SIGKILL)
        finished = running.wait(10)
        assert (finished.status, finished.stop_reason) == ("failed", "error")
        assert "the engine process was killed by signal 9" in (finished.error or "")
        assert finished.token_ids == undisturbed[: len(finished.token_ids)]
        assert len(finished.token_ids) >= 8
        assert finished.text == "".join(token.text for token in running.tokens) != ""
        assert finished.figures.num_tokens == len(finished.token_ids)
        assert (waiting.wait(10).status, len(waiting.events)) == ("failed", 1)
        wait_until(lambda: is_gone(draft), 10)
        assert fragile.wait_ready(120).draft is not None
        assert fragile.process_id() != process_id
        assert len(running.events) == running.events.index(finished) + 1
        again = run_to_end(fragile, STORY, "ssd", greedy(NUM_TOKENS))
        assert again.ids == undisturbed
        assert_speculates(again)

    def test_an_engine_that_dies_before_it_is_ready_fails_at_once(self, tmp_path: Path) -> None:
        seen: list[EngineStatus] = []
        with Engine(EngineConfig(target=str(tmp_path)), on_status=seen.append) as engine:
            wait_until(engine.process_id, 5)
            os.kill(engine.process_id() or 0, signal.SIGKILL)
            with pytest.raises(ModelError, match=r"killed by signal 9\. Restart the application"):
                engine.wait_ready(10)
        assert seen[0].state == "failed"

    def test_closing_in_the_middle_of_a_run_ends_both_processes(self, fragile: Engine) -> None:
        """Last of the tests that use this engine."""
        process_id = fragile.process_id()
        assert process_id is not None
        processes = [psutil.Process(process_id), draft_process(fragile)]
        run = start_run(fragile, STORY, "ssd", greedy(1024))
        waiting = start_run(fragile, STORY, "ar", greedy(4))
        run.wait_for_tokens(4)
        fragile.close()
        for ended in (run, waiting):
            assert ended.is_over
            finished = ended.finished
            assert (finished.status, finished.stop_reason, finished.error) == ("stopped", "user", None)
        assert len(run.ids) >= 4
        assert waiting.ids == ()
        assert all(is_gone(process) for process in processes)
        assert fragile.status.state == "closed"
        fragile.close()


@dataclass
class ThreadedEngine(LocalEngine):
    """A LocalEngine whose draft is a real DraftServer behind a real link, in a thread."""

    begun: list[Begin] = field(default_factory=list)
    link: Link = field(default_factory=Link.listen)

    def start(self) -> threading.Thread:
        assert self.draft is not None
        server = DraftServer(Link.connect(self.link.address))
        server.speculator = Speculator(self.draft)

        def serve() -> None:
            server.run()
            server.link.close()

        thread = threading.Thread(target=serve)
        thread.start()
        return thread

    def _source(
        self, request: GenerationRequest, prompt: Sequence[int], should_stop: Callable[[], bool]
    ) -> CandidateSource:
        if request.mode == "ar":
            return NoDraft()
        assert self.draft is not None
        begin = Begin(
            epoch=self.epoch,
            mode=request.mode,
            prompt_token_ids=tuple(prompt),
            sampling=request.sampling,
            speculation=request.speculation,
            eos_token_ids=(),
            lookahead=request.speculation.lookahead,
        )
        return DraftSource(
            begin,
            self.link.send,
            self.link.receive,
            token_ids=None,
            num_columns=self.draft.vocabulary_size,
            timeout=10.0,
            should_stop=should_stop,
            clock=time.perf_counter,
        )


class TestOutOfMemory:
    @pytest.mark.parametrize("mode", ["sd", "ssd"])
    @pytest.mark.parametrize("fails_at", [1, 2, 3, 7, 20])
    def test_a_draft_without_memory_is_reported_and_serves_the_next_request(self, mode: Mode, fails_at: int) -> None:
        table = hashed(12, 3.0, salt=1)
        failing = {"at": fails_at}

        def run_out(number: int) -> None:
            if number == failing["at"]:
                raise MemoryError("no 24 MiB left")

        draft = ScriptedRunner(mixed(table, hashed(12, 3.0, salt=2), 0.3), 12, on_forward=run_out)
        engine = ThreadedEngine(ScriptedRunner(table, 12), draft)
        thread = engine.start()
        try:
            sampling = SamplingParams(max_new_tokens=60)
            reference = engine.run("ar", [1, 2, 3], sampling)
            hurt = engine.run(mode, [1, 2, 3], sampling)
            assert hurt.ids == reference.ids
            (notice,) = [event for event in hurt.events if isinstance(event, Notice)]
            assert "MemoryError: no 24 MiB left" in notice.message
            well = engine.run(mode, [1, 2, 3], sampling)
            assert well.ids == reference.ids
            assert not [event for event in well.events if isinstance(event, Notice)]
            assert well.finished.figures.num_accepted_draft_tokens > 0
        finally:
            engine.link.send(Shutdown())
            thread.join(10)
            engine.link.close()
        assert not thread.is_alive()


APPLICATION = """
import sys, time
from saguaro_core.config import EngineConfig, GenerationRequest, Message, SamplingParams
from saguaro_core.engine import Engine
from saguaro_core.events import TokenEvent

def on_event(event):
    if isinstance(event, TokenEvent) and event.index == 5:
        print("running", flush=True)

def main():
    request = GenerationRequest(
        messages=(Message(role="user", content="Hello"),), sampling=SamplingParams(max_new_tokens=90_000)
    )
    engine = Engine(EngineConfig(target=sys.argv[1], draft=sys.argv[1]))
    engine.start()
    engine.wait_ready(120)
    engine.submit("run", request, on_event)
    return engine

if sys.argv[2] == "leaves":
    engine = main()
    time.sleep(1.0)
else:
    with main() as engine:
        time.sleep(120)
"""


class TestEndOfTheApplication:
    @pytest.mark.parametrize("ending", ["killed", "interrupted", "terminated", "leaves"])
    def test_no_process_and_no_file_outlives_it(
        self, tiny_llama: Callable[..., Path], tmp_path: Path, ending: str
    ) -> None:
        folder = tiny_llama(context_length=100_000, eos_token_id=None)
        application = subprocess.Popen(
            [sys.executable, "-c", APPLICATION, str(folder), ending],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        try:
            assert application.stdout is not None
            assert application.stdout.readline() == "running\n"
            engine = only_child(application.pid)
            processes = [engine, only_child(engine.pid)]
            if ending == "killed":
                application.kill()
            elif ending == "interrupted":  # Ctrl-C reaches the whole group.
                os.killpg(application.pid, signal.SIGINT)
            elif ending == "terminated":
                application.terminate()
            _, complaints = application.communicate(timeout=20)
        finally:
            application.kill()
            application.wait()
        wait_until(lambda: all(is_gone(process) for process in processes), 10)
        assert list(tmp_path.glob("saguaro-*")) == []
        codes = {"killed": -signal.SIGKILL, "interrupted": -signal.SIGINT, "terminated": -signal.SIGTERM, "leaves": 0}
        assert application.returncode == codes[ending]
        tracebacks = complaints.count("Traceback")
        assert tracebacks == (1 if ending == "interrupted" else 0), complaints
