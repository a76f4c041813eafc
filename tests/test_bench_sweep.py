"""The sweeps: their points, the fitted power law, the tables, and the command line over a scripted engine."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_bench import PACE, Outcome, ScriptedEngine, command_line

from saguaro_core.bench_measure import Measurement
from saguaro_core.bench_sweep import main
from saguaro_core.bench_sweep_fan_out import BUDGETS, POLICIES
from saguaro_core.bench_sweep_fit import fit, fit_together, hit_rate_after, predicted_hit_rate
from saguaro_core.bench_sweep_kinds import CS, LOOKAHEADS
from saguaro_core.events import PreparedOutcome, RoundEvent, RunFinished
from saguaro_core.fan_out import uniform_fan_out
from saguaro_core.run_figures import RunFigures

LOOKAHEAD, VOCABULARY = 3, 500


@pytest.fixture
def sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    return command_line(tmp_path, capsys, main)


def drawn_run(acceptance: float, power_law_r: float, budget: int, num_rounds: int = 4000) -> Measurement:
    """A run whose outcomes follow the model exactly: geometric acceptance, ranks by the power law."""
    chance = random.Random(5)
    fan_out = uniform_fan_out(LOOKAHEAD, budget)
    prepared = tuple(PreparedOutcome(accepted=k, token_ids=tuple(range(count))) for k, count in enumerate(fan_out))
    rounds: list[RoundEvent] = []
    is_hit = False
    for index in range(num_rounds):
        accepted = 0
        while accepted < LOOKAHEAD and chance.random() < acceptance:
            accepted += 1
        rank = int(min(VOCABULARY, chance.random() ** (-1.0 / power_law_r)))  # P(rank > F) = (F + 1)^-r
        rounds.append(
            RoundEvent(
                run_id="drawn",
                index=index,
                drafted=LOOKAHEAD,
                accepted=accepted,
                bonus_token_id=rank - 1,
                start=0.0,
                verify_ms=1.0,
                draft_ms=0.0,
                wait_ms=0.0,
                cache="hit" if is_hit else "miss",
                fan_out=fan_out,
                prepared=prepared,
                num_committed=accepted + 1,
            )
        )
        is_hit = rank <= fan_out[accepted]
    finished = RunFinished(
        run_id="drawn", status="finished", stop_reason="length", time=1.0, text="", token_ids=(), figures=RunFigures()
    )
    return Measurement(mode="ssd", column="drawn", prompt=0, repeat=0, finished=finished, rounds=tuple(rounds))


@pytest.mark.parametrize(("acceptance", "power_law_r"), [(0.5, 0.6), (0.8, 1.2)])
def test_the_fit_finds_the_law_that_drew_the_rounds_and_predicts_their_hits(
    acceptance: float, power_law_r: float
) -> None:
    run = drawn_run(acceptance, power_law_r, budget=24)
    together, fitted = fit_together([run]), fit([run])
    for estimate in (together, *fitted.values()):
        assert estimate.acceptance == pytest.approx(acceptance, abs=0.03)
        assert estimate.power_law_r == pytest.approx(power_law_r, rel=0.12)
    after_hit, after_miss = hit_rate_after([run], "hit"), hit_rate_after([run], "miss")
    assert after_hit is not None
    assert after_miss is not None
    measured = after_miss / (1 - after_hit + after_miss)
    predicted = predicted_hit_rate(lambda state: uniform_fan_out(LOOKAHEAD, 24), fitted)
    assert predicted == pytest.approx(measured, abs=0.03)


def test_a_law_fitted_at_one_budget_predicts_another() -> None:
    fitted = fit([drawn_run(0.7, 0.8, budget=24)])
    other = drawn_run(0.7, 0.8, budget=8)
    measured = sum(event.cache == "hit" for event in other.rounds) / len(other.rounds)
    assert predicted_hit_rate(lambda state: uniform_fan_out(LOOKAHEAD, 8), fitted) == pytest.approx(measured, abs=0.04)


def test_fan_out_runs_every_shape_at_every_budget(sweep: Callable[..., Outcome]) -> None:
    engine = ScriptedEngine()
    outcome = sweep(engine, "fan-out", "--prompts", "2", "--max-new-tokens", "8")
    assert outcome.status == 0
    shapes = [
        (r.speculation.fan_out, r.speculation.budget) for r in engine.requests[1 : 1 + len(BUDGETS) * len(POLICIES)]
    ]
    assert shapes == [(policy, budget) for budget in BUDGETS for policy in POLICIES]
    lists = [r.speculation.fan_out_list for r in engine.requests if r.speculation.fan_out == "list"]
    assert [sum(counts) for counts in lists] == list(BUDGETS) * 2
    assert len(outcome.data["points"]) == (len(POLICIES) + 1) * len(BUDGETS)
    predicted = outcome.data["predicted_hit_rates"]
    assert set(predicted) == {point["name"] for point in outcome.data["points"]}
    assert {name for name, rate in predicted.items() if rate is None} == {f"confident {budget}" for budget in BUDGETS}
    assert "fit after a hit: a = " in outcome.out


def test_c_runs_sampled_with_rejection_and_says_what_it_is_refused_for(sweep: Callable[..., Outcome]) -> None:
    engine = ScriptedEngine()
    outcome = sweep(engine, "c", "--prompts", "1", "--max-new-tokens", "8")
    settings = {(r.sampling.temperature, r.speculation.rule) for r in engine.requests}
    assert settings == {(0.8, "rejection")}
    assert [r.speculation.saguaro_c for r in engine.requests[1:]] == list(CS)
    assert outcome.out.count("refused: ") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["c", "--temperature", "0"], "temperature is 0: the draft draws nothing"),
        (["c", "--rule", "shared_noise"], "no draft distribution enters that rule"),
        (["lookahead", "--rule", "luck"], "rule is 'luck'"),
        (["fallback", "--prompts", "0"], "prompts is 0"),
        (["speed"], "speed"),
    ],
)
def test_what_means_nothing_is_refused_with_a_reason(
    sweep: Callable[..., Outcome], arguments: list[str], message: str
) -> None:
    engine = ScriptedEngine()
    outcome = sweep(engine, *arguments)
    assert (outcome.status, outcome.out, engine.config) == (2, "", None)
    assert message in outcome.err


def test_lookahead_pairs_sd_and_ssd_with_ar(sweep: Callable[..., Outcome]) -> None:
    outcome = sweep(ScriptedEngine(), "lookahead", "--prompts", "2", "--max-new-tokens", "20")
    assert set(outcome.data["ratios"]) == {str(k) for k in LOOKAHEADS}
    assert outcome.data["ratios"]["3"]["ssd_over_sd"]["median"] == pytest.approx(2.0)
    assert len(outcome.out.splitlines()) == 1 + len(LOOKAHEADS)


def test_fallbacks_are_compared_and_b_star_is_said(
    sweep: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACE, "ssd", (2, 0.025, "fallback", 0.002))
    outcome = sweep(ScriptedEngine(), "fallback", "--prompts", "1", "--max-new-tokens", "8")
    assert [point["name"] for point in outcome.data["points"]] == ["auto", "neural", "fast"]
    assert "b* of Theorem 17" in outcome.out


def test_an_interrupt_shows_what_was_measured(sweep: Callable[..., Outcome]) -> None:
    class Interrupted(ScriptedEngine):
        def submit(self, run_id, request, on_event):  # type: ignore[no-untyped-def]
            self.hang = len(self.requests) == 4
            super().submit(run_id, request, on_event)

    engine = Interrupted()
    outcome = sweep(engine, "lookahead", "--prompts", "1", "--max-new-tokens", "8")
    assert outcome.status == 130
    assert outcome.data["is_whole"] is False
    assert [point["name"] for point in outcome.data["points"]] == ["ar"]
    assert "interrupted: not all prompts" in outcome.out
    assert engine.is_closed


def test_a_failed_run_ends_the_sweep_with_its_reason(sweep: Callable[..., Outcome]) -> None:
    outcome = sweep(ScriptedEngine(fail_on="sd"), "lookahead", "--prompts", "1", "--max-new-tokens", "8")
    assert (outcome.status, outcome.out, outcome.data) == (1, "", {})
    assert "prompt 1 at sd 1 failed: the script says so" in outcome.err
