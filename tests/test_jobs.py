"""Work that is left between two parts of a forward: gone on with, finished or dropped, as the verdict wants."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from scripted import ScriptedRunner, hashed
from torch import Tensor

from saguaro_core.checks.local import MemoryLink
from saguaro_core.config import SamplingParams, SpeculationConfig
from saguaro_core.draft.messages import Begin, End, Ended, Message, Shutdown, Speculation, Verified, decode, encode
from saguaro_core.draft.process import DraftServer
from saguaro_core.draft.speculator import Speculator
from saguaro_core.models.runner import DivisibleRunner, ForwardBatch, Parts, trunk_batch
from saguaro_core.models.steps import Job, Steps
from saguaro_core.service import MIN_ROUNDS

V, K = 24, 4
PROMPT = (3, 1, 4, 1, 5)


@dataclass
class PartedRunner(ScriptedRunner):
    """A ScriptedRunner whose forwards come in four parts. Like layers, the first ones leave slots half written."""

    num_parts: int = 4

    def forward_in_parts(self, batch: ForwardBatch) -> Parts:
        for _ in range(self.num_parts - 1):
            self.slots |= {(0, slot): (10**6, V) for slot in batch.slots[0].tolist()}
            yield
        return self.forward(batch)


def parted() -> PartedRunner:
    return PartedRunner(hashed(V, 2.0, salt=1), V)


def two_forwards() -> Steps[tuple[Tensor | None, Tensor | None]]:
    first = yield trunk_batch([1, 2], 0, 1)
    second = yield trunk_batch([3], 2, 1)
    return first, second


class TestJob:
    @pytest.mark.parametrize("make", [parted, lambda: ScriptedRunner(hashed(V, 2.0, salt=1), V)])
    def test_all_at_once_makes_every_forward(self, make: Callable[[], ScriptedRunner]) -> None:
        runner = make()
        assert Job(runner, two_forwards()).go_on()
        assert runner.num_forwards == 2

    def test_it_stops_where_it_is_told_and_goes_on_from_there(self) -> None:
        runner = parted()
        assert isinstance(runner, DivisibleRunner)
        job, shares = Job(runner, two_forwards()), []
        while not job.go_on(lambda: False):
            shares.append(job.share_done)
        assert shares == [0.25, 0.5, 0.75] * 2
        assert runner.num_forwards == 2

    def test_what_is_dropped_goes_no_further(self) -> None:
        runner = parted()
        job = Job(runner, two_forwards())
        assert not job.go_on(lambda: False)
        job.drop()
        assert runner.num_forwards == 0

    def test_an_error_in_a_forward_is_the_jobs(self) -> None:
        def fail(number: int) -> None:
            raise RuntimeError("broken")

        runner = parted()
        runner.on_forward = fail
        with pytest.raises(RuntimeError, match="broken"):
            Job(runner, two_forwards()).go_on()


class InterruptingLink(MemoryLink):
    """A message comes after so many questions whether one is there; with its answer the server's loop ends."""

    def __init__(self) -> None:
        super().__init__()
        self.after = 0
        self.late: Message | None = None

    def has_message(self) -> bool:
        self._count()
        return super().has_message()

    def receive(self, timeout: float) -> Message | None:
        self._count(is_idle=timeout > 0)
        return Shutdown() if self.outbox else super().receive(timeout)

    def _count(self, *, is_idle: bool = False) -> None:
        self.after -= 1
        if self.late is not None and (is_idle or self.after <= 0):
            self.inbox.append(decode(*encode(self.late)))
            self.late = None


class Interrupted:
    """A draft server whose verdicts come at any moment of a build."""

    def __init__(self, sampling: SamplingParams | None = None, **speculation: Any) -> None:
        self.link = InterruptingLink()
        self.server, self.runner = DraftServer(self.link), parted()
        self.server.speculator = self.speculator = Speculator(self.runner)
        config = SpeculationConfig(**{"lookahead": K, "budget": 8, "fallback": "neural", **speculation})
        self.begin = Begin(
            epoch=1,
            mode="ssd",
            prompt_token_ids=PROMPT,
            sampling=sampling or SamplingParams(),
            speculation=config,
            eos_token_ids=(),
            lookahead=K,
        )
        self.number = 0

    def send(self, message: Message, after: int) -> Message:
        self.link.after, self.link.late = after, message
        self.server.run()
        return self.link.outbox.popleft()

    def verdict(self, accepted: int, bonus: int, after: int) -> Speculation:
        self.number += 1
        message = Verified(epoch=1, round_index=self.number, accepted=accepted, bonus_token_id=bonus, lookahead=K)
        answer = self.send(message, after)
        assert isinstance(answer, Speculation)
        return answer

    def likely(self) -> int:
        """The bonus token that the draft itself would choose after its whole speculation."""
        scores = hashed(V, 2.0, salt=1)(tuple(self.speculator.context + self.speculator.drafted.token_ids))
        return int(torch.tensor(scores).argmax())


class TestVerdicts:
    @pytest.mark.parametrize("copying", ["ngram", "off"])
    def test_whenever_the_verdict_comes_the_answer_is_about_the_right_text(self, copying: str) -> None:
        """Every moment of the build: in the trunk, in the first pass, in later ones, and after the last."""
        kinds = set()
        for after in range(1, 90):
            subject = Interrupted(copying=copying)
            assert isinstance(subject.send(subject.begin, 1), Speculation)
            for _ in range(5):
                drafted = subject.speculator.drafted.token_ids
                answer = subject.verdict(len(drafted), subject.likely(), after)
                kinds.add(answer.cache)
                speculator = subject.speculator
                # Each slot of the trunk holds the token and position of its place in the text.
                text = speculator.context + speculator.drafted.token_ids
                held = [subject.runner.slots[0, slot] for slot in range(len(speculator.trunk))]
                assert held == list(enumerate(text[: len(held)]))
                assert answer.round_index == subject.number
                if copying == "off":
                    greedy = hashed(V, 2.0, salt=1)
                    for place, token in enumerate(answer.token_ids):
                        history = tuple(speculator.context + list(answer.token_ids[:place]))
                        assert token == int(torch.tensor(greedy(history)).argmax())
        assert kinds == {"hit", "miss"}

    def test_a_pass_that_serves_another_outcome_is_left_at_once(self) -> None:
        subject = Interrupted()
        subject.send(subject.begin, 1)
        subject.server._build()  # The trunk.
        forwards = subject.runner.num_forwards
        subject.verdict(0, V - 1 if subject.likely() != V - 1 else 0, after=2)
        drafted = len(subject.speculator.drafted.token_ids)
        assert subject.runner.num_forwards <= forwards + drafted

    @pytest.mark.parametrize("after", range(1, 40, 3))
    def test_drawn_tokens_do_not_depend_on_the_moment(self, after: int) -> None:
        said = []
        for moment in (after, 10**6):
            subject = Interrupted(SamplingParams(temperature=1.0, seed=3), rule="rejection", budget=16)
            answers = [subject.send(subject.begin, 1)]
            for number in range(6):
                drafted = subject.speculator.drafted.token_ids
                answers.append(
                    subject.verdict(min(number, len(drafted)), (5 * number) % V, after if moment == after else 1)
                )
            said.append([(a.token_ids, a.q, a.cache) for a in answers if isinstance(a, Speculation)])
        assert said[0] == said[1]

    def test_an_end_or_a_new_request_in_the_middle_of_a_pass(self) -> None:
        subject = Interrupted()
        subject.send(subject.begin, 1)
        assert isinstance(subject.send(End(epoch=1), after=3), Ended)
        assert subject.server._unfinished is None
        again = subject.send(subject.begin, 1)
        assert isinstance(again, Speculation)
        # The next one comes while a pass of the last is under way.
        other = replace(subject.begin, epoch=2, prompt_token_ids=(7, 7, 2))
        answer, fresh = subject.send(other, after=3), Interrupted().send(other, 1)
        assert isinstance(answer, Speculation)
        assert isinstance(fresh, Speculation)
        assert answer.token_ids == fresh.token_ids
        assert subject.server._unfinished is None

    @pytest.mark.parametrize(("rate", "is_finished"), [(0.001, True), (10**6, False)])
    def test_a_first_token_is_waited_for_if_that_pays(self, rate: float, is_finished: bool) -> None:
        subject = Interrupted(deepening="all", fan_out="uniform")
        subject.send(subject.begin, 1)
        for _ in range(MIN_ROUNDS + 1):
            drafted = subject.speculator.drafted.token_ids
            subject.verdict(len(drafted), subject.likely(), 10**6)
        times = subject.speculator.lessons.times
        times.verify.add(4, 1.0)
        for _ in range(MIN_ROUNDS):
            times.verify.add(4, 1.0)
        times._tokens, times._seconds = rate, 1.0
        subject.server._build()  # The trunk; the first pass is under way when the verdict comes.
        drafted, forwards = subject.speculator.drafted.token_ids, subject.runner.num_forwards
        answer = subject.verdict(len(drafted), subject.likely(), after=2)
        assert answer.cache == ("hit" if is_finished else "miss")
        assert (subject.runner.num_forwards > forwards) >= is_finished

    def test_a_branch_that_has_a_token_is_served_as_it_is(self) -> None:
        subject = Interrupted(deepening="all", fan_out="uniform")
        subject.send(subject.begin, 1)
        for _ in range(2):  # The trunk, and a first token for every branch.
            subject.server._build()
        drafted, forwards = subject.speculator.drafted.token_ids, subject.runner.num_forwards
        answer = subject.verdict(len(drafted), subject.likely(), after=2)
        assert (answer.cache, len(answer.token_ids)) == ("hit", 1)
        assert subject.runner.num_forwards == forwards

    def test_ready_serves_what_is_there_but_lets_a_branch_get_its_first_token(self) -> None:
        subject = Interrupted(service="ready", deepening="all", fan_out="uniform")
        subject.send(subject.begin, 1)
        subject.server._build()
        drafted = subject.speculator.drafted.token_ids
        assert subject.verdict(len(drafted), subject.likely(), after=2).cache == "hit"
