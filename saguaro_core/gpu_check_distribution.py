"""Do sampled tokens follow the target's distribution on this device? Chi-square tests, and a control that must fail.

A tiny random target over eight tokens is asked for the exact joint distribution of the first three tokens of an
answer; a few hundred seeded answers are tested against it, for every way in which tokens are made.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from saguaro_core.checks.chi_square import FALSE_ALARM, chi_square_p_value
from saguaro_core.checks.local import Decoded, LocalDraft, LocalEngine
from saguaro_core.checks.random_models import TINY, make_runner, make_tiny_pair
from saguaro_core.checks.rows import Problems, Row, Setting, reported_in
from saguaro_core.config import Mode, SamplingParams, SpeculationConfig
from saguaro_core.decoding.sources import Proposal
from saguaro_core.decoding.target import TargetSession, Verifier
from saguaro_core.models.runner import Runner
from saguaro_core.verification import Outcome

_SHAPE = replace(TINY, vocabulary_size=8, num_layers=1)
_PROMPT = [1, 5, 2, 7, 0, 3]
_NUM_TOKENS = 4
# The control needs more: it must be caught where a right rule would be accused once in a billion times.
_NUM_ANSWERS, _TINY_ANSWERS, _CONTROL_ANSWERS = 240, 16, 120
_CASES: dict[str, tuple[Mode, dict[str, Any]]] = {
    "SD, rejection": ("sd", {"rule": "rejection"}),
    "SSD, rejection": ("ssd", {"rule": "rejection", "budget": 4, "saguaro_c": 0.5}),
    "SSD, shared noise": ("ssd", {"budget": 4}),
}
_NAME = "distribution: {}"
_CONTROL = "distribution: a wrong rule is caught"


class _TrustingVerifier(Verifier):
    """The negative control: it keeps whatever the draft says."""

    def decide(self, logits: Tensor, proposal: Proposal, position: int) -> Outcome:
        k = len(proposal.token_ids)
        return Outcome(k, super().decide(logits[k:], Proposal(token_ids=[]), position + k).bonus_token_id)


@dataclass(slots=True)
class _Pair:
    """A target and a draft over eight tokens, and what the target says exactly: P [V, V, V]."""

    engine: LocalEngine
    exact: Tensor
    device: str


def check_distribution(setting: Setting) -> list[Row]:
    """A row for each way of making tokens, and one for the control."""
    rows: list[Row] = []
    with reported_in(rows, _NAME.format("exact probabilities")):
        pair = _make_pair(setting)
    if rows:
        return rows
    count = _TINY_ANSWERS if setting.is_tiny else _NUM_ANSWERS
    for name, (mode, settings) in _CASES.items():
        with reported_in(rows, _NAME.format(name)):
            rows.append(_case(name, mode, settings, pair, count))
    with reported_in(rows, _CONTROL):
        rows.append(_control(pair, max(count, _CONTROL_ANSWERS)))
    return rows


def _make_pair(setting: Setting) -> _Pair:
    target, draft = make_tiny_pair((setting.first, setting.last), difference=1.0, shape=_SHAPE)
    engine = LocalEngine(target, LocalDraft(draft, setting.last), setting.first)
    return _Pair(engine, _exact(make_runner(target.model, setting.first)), setting.first)


def _exact(runner: Runner) -> Tensor:
    """P(t1, t2, t3) after the prompt, from one ordinary forward for each (t1, t2)."""
    size = runner.vocabulary_size
    exact = torch.empty(size, size, size, dtype=torch.float64)
    for first, second in itertools.product(range(size), repeat=2):
        session = TargetSession(runner)
        list(session.prefill(_PROMPT, 256))
        rows = session.verify(_PROMPT, [first, second]).double().softmax(-1).cpu()
        exact[first, second] = rows[0, first] * rows[1, second] * rows[2]
    return exact


def _answers(
    mode: Mode, settings: dict[str, Any], pair: _Pair, count: int, verifier: type[Verifier] = Verifier
) -> list[Decoded]:
    speculation = SpeculationConfig(lookahead=2, **settings)
    answers = []
    for seed in range(count):
        sampling = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=_NUM_TOKENS)
        judge = verifier(sampling, speculation.rule, _SHAPE.vocabulary_size, pair.device)
        answers.append(pair.engine.run(mode, _PROMPT, sampling, speculation, judge))
    return answers


def _smallest_p_value(answers: Sequence[Decoded], exact: Tensor) -> float:
    """Over three tests: the joint distribution of the first two tokens, of the next two, and of the third token."""
    places = (((0, 1), exact.sum(2)), ((1, 2), exact.sum(0)), ((2,), exact.sum((0, 1))))
    return min(
        _p_value(Counter(tuple(answer.token_ids[i] for i in at) for answer in answers), p, len(answers))
        for at, p in places
    )


def _p_value(counts: Counter[tuple[int, ...]], probabilities: Tensor, total: int) -> float:
    cells = list(itertools.product(*(range(size) for size in probabilities.shape)))
    observed = [counts[cell] for cell in cells]
    return chi_square_p_value(observed, [float(probabilities[cell]) * total for cell in cells])


def _case(name: str, mode: Mode, settings: dict[str, Any], pair: _Pair, count: int) -> Row:
    problems, answers = Problems(), _answers(mode, settings, pair, count)
    rounds = [event for answer in answers for event in answer.rounds]
    accepted, hits = sum(event.accepted for event in rounds), sum(event.cache == "hit" for event in rounds)
    p = _smallest_p_value(answers, pair.exact)
    problems.expect(p > FALSE_ALARM, "the answers do not follow the target's distribution")
    problems.expect(accepted > 0 and (hits > 0 or mode == "sd"), "no token was accepted, or no round hit the cache")
    detail = (
        f"{count} answers, {accepted} tokens accepted, {hits} hits; smallest p of 3 chi-square tests {p:.2g}, "
        f"each of which fails by chance once in {1 / FALSE_ALARM:.0e} times"
    )
    return problems.row(_NAME.format(name), detail, {"p": p})


def _control(pair: _Pair, count: int) -> Row:
    mode, settings = _CASES["SSD, rejection"]
    p = _smallest_p_value(_answers(mode, settings, pair, count, _TrustingVerifier), pair.exact)
    caught = p < FALSE_ALARM
    detail = f"keeping every drafted token gives p {p:.2g}, {'below' if caught else 'not below'} {FALSE_ALARM:g}"
    return Row(_CONTROL, "passed" if caught else "failed", detail, {"p": p})
