"""Copies in the draft's distribution: what is found, what is mixed, what is learnt; and how far q can be trusted."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_engine import LocalEngine
from scripted import ScriptedRunner, hashed
from strategies import EXACT

from saguaro_core.confidence import Confidence
from saguaro_core.config import SamplingParams, SpeculationConfig
from saguaro_core.copying import CopyGuide, CopyWeights
from saguaro_core.ngrams import MAX_NGRAM, NgramIndex

V = 12
TEXT = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]


def guide(text: list[int] = TEXT, temperature: float = 1.0, columns: range = range(V)) -> CopyGuide:
    column_of = {token: column for column, token in enumerate(columns)}
    return CopyGuide(NgramIndex(text), column_of, temperature, CopyWeights())


class TestNgrams:
    @EXACT
    @given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=12))
    def test_the_longest_match_that_something_followed_and_its_latest_place(
        self, text: list[int], tail: list[int]
    ) -> None:
        n, place = NgramIndex(text).find(tail)
        known = [
            (m, p)
            for m in range(1, min(MAX_NGRAM, len(tail)) + 1)
            for p in range(m, len(text))
            if text[p - m : p] == tail[len(tail) - m :]
        ]
        assert (n, place) == (max(known) if known else (0, 0))


class TestMixing:
    @pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
    def test_q_becomes_the_mixture(self, temperature: float) -> None:
        torch.manual_seed(1)
        subject, logits = guide(temperature=temperature), torch.randn(3, V) * 2
        tails = [TEXT, [7, 7], [9, 2, 3]]
        own = (logits / temperature).softmax(-1)
        mixed = (subject.mix(logits, tails) / temperature).softmax(-1)
        for row, copied, n in ((0, 4, 3), (2, 5, 3)):
            w = CopyWeights().weight(n)
            expected = own[row] * (1 - w)
            expected[copied] += w
            assert torch.allclose(mixed[row], expected, atol=1e-6)
        assert torch.equal(mixed[1], own[1])

    def test_what_the_head_lacks_is_not_copied(self) -> None:
        logits = torch.zeros(1, 4)
        assert guide(columns=range(4)).mix(logits, [TEXT]) is logits  # Token 4 follows.
        assert guide(columns=range(4, 8)).mix(logits, [TEXT])[0, 0] > 0

    def test_longer_matches_weigh_more_and_are_right_more_often_until_an_answer_says_otherwise(self) -> None:
        subject, first = guide(), CopyWeights()
        weights = [first.weight(n) for n in range(1, MAX_NGRAM + 1)]
        assert weights == sorted(weights)
        assert subject.guess(TEXT) == (4, subject.share(3))
        before = subject.share(3)
        subject.observe([4], ())  # What followed 1 2 3 before.
        assert subject.share(3) > before
        for _ in range(50):
            subject.observe([8], ())
        assert 0 < subject.share(3) < before / 2


class TestWeights:
    def learnt(self, q_right: float, right: float) -> float:
        """w after many verdicts on a draft with this q on tokens that the copy has right in this share of cases."""
        weights, chances = CopyWeights(), random.Random(1)
        subject = CopyGuide(NgramIndex(TEXT), {token: token for token in range(V)}, 1.0, weights)
        for _ in range(3000):
            w, is_right = weights.weight(3), chances.random() < right
            # The draft proposes what the copy says, and it is accepted; or another token, which is not.
            if is_right:
                subject.observe([4, 0], [(1 - w) * q_right + w])
            else:
                subject.observe([8], [w])
        return weights.weight(3)

    def test_a_draft_that_knows_the_token_needs_no_copy(self) -> None:
        assert self.learnt(q_right=0.98, right=0.6) < 0.1

    def test_a_draft_that_does_not_gets_as_much_as_copies_are_right(self) -> None:
        assert self.learnt(q_right=1e-6, right=0.6) == pytest.approx(0.6, abs=0.08)
        assert self.learnt(q_right=1e-6, right=0.1) == pytest.approx(0.1, abs=0.05)

    def test_tokens_that_were_no_proposal_of_the_drafts_change_nothing(self) -> None:
        weights = CopyWeights()
        subject = CopyGuide(NgramIndex(TEXT), {token: token for token in range(V)}, 1.0, weights)
        before = [weights.weight(n) for n in range(1, MAX_NGRAM + 1)]
        for _ in range(9):
            subject.observe([4, 8, 8], ())
        assert [weights.weight(n) for n in range(1, MAX_NGRAM + 1)] == before


class TestConfidence:
    def test_what_q_promises_is_believed_until_verdicts_say_otherwise(self) -> None:
        subject = Confidence()
        assert subject.acceptance(0.7) == pytest.approx(0.7)
        chances = random.Random(3)
        for _ in range(4000):
            q = chances.random()
            subject.observe([q], accepted=int(chances.random() < 0.5 * q))
        for q in (0.3, 0.5, 0.7, 0.9):
            assert subject.acceptance(q) == pytest.approx(0.5 * q, abs=0.13)

    def test_tokens_behind_the_first_rejected_one_say_nothing(self) -> None:
        subject = Confidence()
        subject.observe([0.9, 0.5, 0.1], accepted=1)
        assert subject.acceptance(0.9) > 0.9
        assert subject.acceptance(0.5) < 0.5
        assert subject.acceptance(0.1) == pytest.approx(0.1)

    def test_it_stays_off_0_and_1(self) -> None:
        subject = Confidence()
        for _ in range(99):
            subject.observe([1.0], 1)
            subject.observe([0.0], 0)
        assert 0 < subject.acceptance(0.0) < subject.acceptance(1.0) < 1


def repeating() -> Any:
    """A target that loves to say again what it said, and a draft that knows nothing."""
    base = hashed(V, 4.0, salt=1, order=1)
    return base, hashed(V, 1.0, salt=9)


@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_copies_help_a_draft_that_does_not_know_the_text(mode: Any, rule: Any) -> None:
    target, draft = repeating()
    accepted = {}
    for copying in ("ngram", "off"):
        engine = LocalEngine(ScriptedRunner(target, V), ScriptedRunner(draft, V))
        config = SpeculationConfig(copying=copying, rule=rule, fallback="neural", service="full")
        sampling = SamplingParams(temperature=0.4, seed=2, max_new_tokens=150)
        run = engine.run(mode, [1, 2, 3], sampling, config)
        accepted[copying] = sum(event.accepted for event in run.rounds) / sum(event.drafted for event in run.rounds)
    assert accepted["ngram"] > accepted["off"] + 0.1


def test_drawn_tokens_do_not_depend_on_when_a_branch_was_drafted() -> None:
    """Copies are learnt from every committed token, but a branch goes on as it was begun."""
    target, draft = repeating()
    said = set()
    for passes in (0, 1, 2, 3, 100):
        engine = LocalEngine(ScriptedRunner(target, V), ScriptedRunner(draft, V), passes=lambda n, p=passes: p)  # type: ignore[misc]
        config = SpeculationConfig(rule="rejection", budget=20)
        sampling = SamplingParams(temperature=1.0, seed=4, max_new_tokens=120)
        run = engine.run("ssd", [1, 2, 3], sampling, config)
        said.add((run.ids, tuple((event.drafted, event.cache) for event in run.rounds)))
    assert len(said) == 1


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
def test_the_same_seed_gives_the_same_answer_with_copies(mode: Any, rule: Any) -> None:
    target, draft = repeating()
    runs = [
        LocalEngine(ScriptedRunner(target, V), ScriptedRunner(draft, V)).run(
            mode, [1, 2, 3], SamplingParams(temperature=1.0, seed=8, max_new_tokens=80), SpeculationConfig(rule=rule)
        )
        for _ in range(2)
    ]
    assert runs[0].ids == runs[1].ids
