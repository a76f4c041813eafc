"""Every path that can emit a token follows the target's processed distribution, in that exact configuration.

Scripted target and draft over five tokens, a few hundred seeded answers for each configuration. Two families of
checks: the first, second and third token of an answer against their exact marginals, and the first token of every
round against the target's row for the token before it, apart for each way in which the round's speculation was found
(whether a round was a hit is settled before its tokens are drawn, so conditioning on it is fair; conditioning on
acceptance would not be). All answers of a configuration come from one pair of models, so that prompts are found in
the caches.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from local_engine import LocalEngine, LocalRun
from scripted import ScriptedRunner, markov

import saguaro_core.verification as verification
from saguaro_core.checks.chi_square import FALSE_ALARM, histogram_p_value, transitions_p_value
from saguaro_core.config import Mode, SamplingParams, SpeculationConfig
from saguaro_core.copying import CopyWeights
from saguaro_core.draft.speculator import Speculator
from saguaro_core.sampling import Processing, Stream, process_logits, uniforms
from saguaro_core.verification import DraftDistributions, Outcome

P = [
    [0.40, 0.25, 0.20, 0.10, 0.05],
    [0.05, 0.15, 0.50, 0.20, 0.10],
    [0.31, 0.29, 0.06, 0.04, 0.30],
    [0.11, 0.09, 0.12, 0.60, 0.08],
    [0.24, 0.19, 0.16, 0.21, 0.20],
]
Q = [
    [0.10, 0.50, 0.10, 0.20, 0.10],
    [0.40, 0.05, 0.15, 0.10, 0.30],
    [0.05, 0.25, 0.40, 0.20, 0.10],
    [0.30, 0.10, 0.20, 0.15, 0.25],
    [0.10, 0.30, 0.05, 0.10, 0.45],
]
PROMPT = [1, 2, 4, 2, 0]
NUM_ANSWERS = 260
NUM_TOKENS = 11

REJECTION = {"rule": "rejection"}
CONFIGURATIONS: dict[str, tuple[Mode, dict[str, Any], dict[str, Any]]] = {
    "ar rejection": ("ar", {}, REJECTION),
    "ar shared noise": ("ar", {}, {}),
    "sd rejection": ("sd", {}, REJECTION),
    "sd shared noise": ("sd", {}, {}),
    "sd rejection top-k top-p": ("sd", {"top_k": 4, "top_p": 0.85, "temperature": 1.3}, REJECTION),
    "ssd rejection neural": ("ssd", {}, {**REJECTION, "budget": 6}),
    "sd rejection without copies": ("sd", {}, {**REJECTION, "copying": "off"}),
    "ssd rejection without copies": ("ssd", {}, {**REJECTION, "budget": 6, "copying": "off"}),
    "ssd shared noise without copies": ("ssd", {}, {"budget": 4, "copying": "off", "fan_out": "geometric"}),
    "ssd rejection fast": ("ssd", {}, {**REJECTION, "budget": 6, "fallback": "fast"}),
    "ssd rejection auto uniform": ("ssd", {}, {**REJECTION, "budget": 6, "fallback": "auto", "fan_out": "uniform"}),
    "ssd rejection pairs": ("ssd", {"max_new_tokens": 4 * NUM_TOKENS}, {**REJECTION, "budget": 2, "fallback": "fast"}),
    "ssd rejection C 0.2": ("ssd", {}, {**REJECTION, "budget": 6, "saguaro_c": 0.2, "deepening": "all"}),
    "ssd rejection C 0": ("ssd", {}, {**REJECTION, "budget": 6, "saguaro_c": 0.0}),
    "ssd rejection top-k top-p": (
        "ssd",
        {"top_k": 4, "top_p": 0.85, "temperature": 1.3},
        {**REJECTION, "budget": 6, "saguaro_c": 0.5},
    ),
    "ssd shared noise neural": ("ssd", {}, {"budget": 4}),
    "ssd shared noise fast": ("ssd", {}, {"budget": 4, "fallback": "fast"}),
    "ssd shared noise top-k top-p": ("ssd", {"top_k": 4, "top_p": 0.85, "temperature": 1.3}, {"budget": 4}),
    # The default pair's draft has such a head: some of the target's tokens, in an order of their own.
    "sd rejection trimmed head": ("sd", {}, {**REJECTION, "columns": [3, 0, 2]}),
    "ssd rejection trimmed head": ("ssd", {}, {**REJECTION, "budget": 6, "columns": [3, 0, 2]}),
    # A draft so slow that what the text alone suggests is worth more.
    "ssd shared noise guesses": ("ssd", {"max_new_tokens": 4 * NUM_TOKENS}, {"budget": 4, "seconds": 0.001}),
    "ssd rejection partial caches": ("ssd", {}, {**REJECTION, "budget": 6, "lookahead": 4}),
    "ssd shared noise partial speculations": ("ssd", {}, {"budget": 6, "lookahead": 4, "service": "ready"}),
}


def processed_rows(sampling: SamplingParams) -> list[list[float]]:
    """The target's processed distribution after each token, computed independently of the engine."""
    rows = []
    for row in P:
        weights = [p ** (1 / sampling.temperature) for p in row]
        if sampling.top_k:
            kth = sorted(weights)[-sampling.top_k]
            weights = [w if w >= kth else 0.0 for w in weights]
        total, mass, kept = sum(weights), 0.0, set()
        for token in sorted(range(len(weights)), key=lambda t: -weights[t]):
            if mass < sampling.top_p * total:
                kept.add(token)
                mass += weights[token]
        weights = [w if token in kept else 0.0 for token, w in enumerate(weights)]
        rows.append([w / sum(weights) for w in weights])
    return rows


def drafting(rows: list[list[float]], columns: list[int] | None, seconds: float) -> ScriptedRunner:
    """A draft whose head has these columns, and that takes so long for a forward."""
    full, kept = markov(rows), columns or list(range(5))
    return ScriptedRunner(
        lambda history: [full(history)[token] for token in kept],
        len(kept),
        on_forward=lambda number: time.sleep(seconds),
    )


def answers(
    mode: Mode,
    sampling: dict[str, Any],
    speculation: dict[str, Any],
    count: int,
    draft: list[list[float]] = Q,
) -> list[LocalRun]:
    passes = (lambda number: 1 + number % 4) if speculation.get("lookahead") == 4 else (lambda number: 100)
    columns = speculation.get("columns")
    engine = LocalEngine(
        ScriptedRunner(markov(P), 5),
        drafting(draft, columns, speculation.get("seconds", 0.0)),
        draft_token_ids=columns,
        passes=passes,
        num_alternatives=0,
        is_warm=True,
    )
    speculation = {name: value for name, value in speculation.items() if name not in ("columns", "seconds")}
    runs = []
    for seed in range(count * NUM_TOKENS // sampling.get("max_new_tokens", NUM_TOKENS)):
        params = SamplingParams.from_mapping(
            {"temperature": 1.0, "seed": seed, "max_new_tokens": NUM_TOKENS, **sampling}
        )
        config = SpeculationConfig.from_mapping({"lookahead": 3, **speculation})
        # Pairs are learnt from answers to other prompts only: what comes before the last token changes nothing else.
        others = [seed // 5**place % 5 for place in range(4)] if config.fallback == "fast" else []
        run = engine.run(mode, [*others, *PROMPT], params, config)
        assert run.finished.status == "finished", run.finished.error
        runs.append(run)
    return runs


def marginals(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Exact distributions of the first, second and third token after the prompt."""
    step = torch.tensor(rows, dtype=torch.float64)
    first = step[PROMPT[-1]]
    return [d.tolist() for d in (first, first @ step, first @ step @ step)]


def first_tokens_by_kind(runs: list[LocalRun]) -> dict[str, list[tuple[int, int]]]:
    """(token before, first token) of every round, by how its speculation was found."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for run in runs:
        text = [*PROMPT, *run.ids]
        kinds = {event.index: f"{event.cache} {event.fallback}" for event in run.rounds}
        for token in run.tokens:
            if token.place == 0:
                at = len(PROMPT) + token.index
                found[kinds[token.round_index]].append((text[at - 1], text[at]))
    return found


def smallest_p_value(runs: list[LocalRun], rows: list[list[float]]) -> float:
    p_values = [
        histogram_p_value([run.ids[place] for run in runs], marginal) for place, marginal in enumerate(marginals(rows))
    ]
    p_values += [transitions_p_value(pairs, dict(enumerate(rows))) for pairs in first_tokens_by_kind(runs).values()]
    return min(p_values)


@cache
def right_answers(name: str) -> list[LocalRun]:
    """The answers of a configuration, made once for all tests that look at them."""
    return answers(*CONFIGURATIONS[name], NUM_ANSWERS)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_tokens_follow_the_targets_distribution(name: str) -> None:
    _, sampling, _ = CONFIGURATIONS[name]
    rows = processed_rows(SamplingParams.from_mapping({"temperature": 1.0, **sampling}))
    assert smallest_p_value(right_answers(name), rows) > FALSE_ALARM


def test_every_kind_of_round_was_tested() -> None:
    for name, needed in {
        "ssd rejection neural": {"hit None", "miss neural", "compulsory neural"},
        "ssd rejection fast": {"hit None", "miss ngram", "miss none", "compulsory none"},
        "ssd rejection pairs": {"hit None", "miss ngram", "miss pair", "miss none"},
        "ssd shared noise fast": {"hit None", "miss ngram", "miss none", "compulsory none"},
    }.items():
        found = first_tokens_by_kind(right_answers(name))
        assert needed <= set(found), (name, {kind: len(pairs) for kind, pairs in found.items()})


def test_partial_speculations_were_tested() -> None:
    for name, wanted in (
        ("ssd shared noise partial speculations", {(1, "short"), (2, "short"), (3, "short")}),
        ("ssd rejection partial caches", {(4, "full")}),
    ):
        rounds = [event for run in right_answers(name) for event in run.rounds]
        served = {(event.drafted, event.served) for event in rounds if event.cache == "hit"}
        assert wanted <= served
        # Where tokens are drawn the branches are drafted on, so that nothing but the answer's end cuts them.
        assert {kind for _, kind in served} - {"plain"} == {kind for _, kind in wanted} | {"full"}


def test_guesses_by_the_text_alone_were_tested() -> None:
    tokens = [token for run in right_answers("ssd shared noise guesses") for token in run.tokens]
    guessed = Counter(token.origin for token in tokens if token.origin in ("cache_hit", "fallback") and token.q is None)
    assert min(guessed["cache_hit"], guessed["fallback"]) >= 20, guessed


def test_without_the_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs run: copies mixed in by torch."""
    monkeypatch.setattr("saguaro_core.scores._is_plain", lambda scores: False)
    mode, sampling, speculation = CONFIGURATIONS["sd rejection"]
    runs = answers(mode, sampling, speculation, NUM_ANSWERS)
    assert smallest_p_value(runs, processed_rows(SamplingParams(temperature=1.0))) > FALSE_ALARM


def test_the_prompt_was_read_once() -> None:
    for mode in ("ar", "ssd"):
        runs = answers(mode, {}, {}, 3)
        assert [run.finished.figures.num_reused_prompt_tokens for run in runs] == [0, *[len(PROMPT) - 1] * 2]
        if mode == "ssd":
            assert [run.finished.figures.num_reused_draft_tokens for run in runs] == [0, *[len(PROMPT) - 1] * 2]


def test_the_expected_rows_agree_with_process_logits() -> None:
    sampling = SamplingParams(temperature=1.3, top_k=4, top_p=0.85)
    scores = process_logits(torch.tensor(P, dtype=torch.float64).log(), Processing.of(sampling))
    assert torch.allclose(
        scores.softmax(-1).double(), torch.tensor(processed_rows(sampling), dtype=torch.float64), atol=1e-6
    )


class TestNegativeControls:
    """Deliberately wrong rules, each a mistake made in the wild, are caught by the very same check."""

    def is_caught(self, name: str = "ssd rejection neural", draft: list[list[float]] = Q) -> bool:
        mode, sampling, speculation = CONFIGURATIONS[name]
        runs = answers(mode, sampling, speculation, NUM_ANSWERS, draft)
        rows = processed_rows(SamplingParams.from_mapping({"temperature": 1.0, **sampling}))
        return smallest_p_value(runs, rows) < FALSE_ALARM

    def test_bonus_from_p_instead_of_the_residual(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("saguaro_core.verification._residual", lambda p, q, token: p)
        assert self.is_caught("ssd rejection without copies")

    def test_copies_that_verification_does_not_hear_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = Speculator._pack

        def wrong(self, *args):  # type: ignore[no-untyped-def]
            sent = right(self, *args)
            before = [self.context[-1], *sent.token_ids[:-1]][: len(sent.token_ids)]
            q = np.array([Q[token] for token in before], np.float32)
            return replace(sent, distributions=q.tobytes() if sent.distributions else b"")

        monkeypatch.setattr(Speculator, "_pack", wrong)
        monkeypatch.setattr(CopyWeights, "weight", lambda self, n: 0.6)
        assert self.is_caught("sd rejection")
        assert not self.is_caught("sd rejection without copies"), "without copies this changes nothing"

    def test_n_grams_verified_as_if_they_had_been_drawn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = verification.verify_rejection

        def wrong(p, q, drafted, accept, bonus):  # type: ignore[no-untyped-def]
            uniform = torch.full((len(drafted), p.shape[-1]), 1 / p.shape[-1])
            return right(p, uniform if q is None and drafted else q, drafted, accept, bonus)

        monkeypatch.setattr("saguaro_core.decoding.target.verify_rejection", wrong)
        assert self.is_caught("ssd rejection fast")

    def test_greedy_acceptance_at_temperature_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = verification.verify_rejection

        def wrong(p, q, drafted, accept, bonus):  # type: ignore[no-untyped-def]
            k = 0
            while k < len(drafted) and drafted[k] == int(p[k].argmax()):
                k += 1
            return Outcome(k, right(p[k:], None, [], [], bonus[k:]).bonus_token_id)

        monkeypatch.setattr("saguaro_core.decoding.target.verify_rejection", wrong)
        assert self.is_caught("sd rejection", draft=P)

    def test_a_coupling_that_trusts_the_draft(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = verification.verify_coupled

        def wrong(scores, noise, drafted):  # type: ignore[no-untyped-def]
            outcome = right(scores, noise, drafted)
            return Outcome(1, int((scores + noise)[1].argmax())) if drafted and outcome.accepted == 0 else outcome

        monkeypatch.setattr("saguaro_core.decoding.target.verify_coupled", wrong)
        assert self.is_caught("ssd shared noise neural")
        assert self.is_caught("ssd shared noise guesses")

    def test_a_trimmed_head_read_as_if_it_were_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = DraftDistributions.over_vocabulary

        def wrong(self, vocabulary_size, device):  # type: ignore[no-untyped-def]
            return right(replace(self, token_ids=None), vocabulary_size, device)

        monkeypatch.setattr(DraftDistributions, "over_vocabulary", wrong)
        assert self.is_caught("sd rejection trimmed head")

    def test_one_seed_for_drafting_and_accepting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(seed: int, stream: Stream, position: int, count: int, lane: int = 0) -> Any:
            return uniforms(seed, Stream.ACCEPT, len(PROMPT), count)

        monkeypatch.setattr("saguaro_core.draft.proposer.uniforms", wrong)
        assert self.is_caught("sd rejection")
