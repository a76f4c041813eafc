"""Runs of one scripted target, and what every run must satisfy."""

from typing import Any

from local_engine import LocalRun
from scripted import ScriptedRunner, Table, hashed
from served_draft import ServedEngine

from saguaro_core.config import Mode, SamplingParams

V = 24
TARGET = hashed(V, 2.0, salt=1)
PROMPT = [3, 1, 4, 1, 5]
BOTH: tuple[Mode, ...] = ("sd", "ssd")


def engine(draft: Table = TARGET, target: Table = TARGET, **options: Any) -> ServedEngine:
    return ServedEngine(ScriptedRunner(target, V), ScriptedRunner(draft, V), **options)


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, **options)


def ar_ids(count: int) -> tuple[int, ...]:
    return engine().run("ar", PROMPT, greedy(count)).ids


def check_consistent(run: LocalRun) -> None:
    """What every run must satisfy, however it ended."""
    finished, tokens, rounds = run.finished, run.tokens, run.rounds
    assert tuple(token.token_id for token in tokens) == finished.token_ids
    assert [token.index for token in tokens] == list(range(len(tokens)))
    assert sum(event.num_committed for event in rounds) == len(tokens) == finished.figures.num_tokens
    assert "".join(token.text for token in tokens) == finished.text
    for event in rounds:
        own = [token for token in tokens if token.round_index == event.index]
        assert [token.place for token in own] == list(range(event.num_committed))
        drafted = [token for token in own if token.origin in ("draft", "cache_hit", "fallback")]
        assert len(drafted) == event.accepted <= event.drafted
        assert all(
            (token.origin in ("draft", "cache_hit", "fallback")) == (token.place < event.accepted) for token in own
        )
        expected = "draft" if event.cache is None else "cache_hit" if event.cache == "hit" else "fallback"
        assert all(token.origin == expected for token in drafted)
