"""A batched row under rejection sampling follows the target's distribution; rows that are mixed up do not."""

from typing import Any

import pytest
from batch_runs import Ask, BatchEngine
from local_engine import LocalRun
from scripted import ScriptedRunner, markov
from test_distribution import PROMPT, P, Q, smallest_p_value

from saguaro_core.checks.chi_square import FALSE_ALARM
from saguaro_core.config import SamplingParams, SpeculationConfig
from saguaro_core.models.rows import forward_together

NUM_BATCHES = 24
NUM_ROWS = 4


def answers() -> list[LocalRun]:
    runs = []
    config = SpeculationConfig(rule="rejection", budget=6, lookahead=3)
    for number in range(NUM_BATCHES):
        asks = [
            Ask(
                [*PROMPT[row:-1], PROMPT[-1]],
                SamplingParams(temperature=1.0, seed=NUM_ROWS * number + row, max_new_tokens=11),
            )
            for row in range(NUM_ROWS)
        ]
        runs += BatchEngine(ScriptedRunner(markov(P), 5), ScriptedRunner(markov(Q), 5)).run("ssd", asks, config)
    return runs


def test_rows_follow_the_targets_distribution() -> None:
    assert smallest_p_value(answers(), P) > FALSE_ALARM


def test_rows_that_are_mixed_up_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(runner: Any, batches: Any, rows: Any) -> Any:
        logits = forward_together(runner, batches, rows)
        same = len({part.shape for part in logits if part is not None}) == 1
        return (*logits[1:], logits[0]) if same else logits

    monkeypatch.setattr("saguaro_core.decoding.batch_loop.forward_together", wrong)
    assert smallest_p_value(answers(), P) < FALSE_ALARM
