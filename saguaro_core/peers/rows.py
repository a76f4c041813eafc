"""One row of the comparison: a peer, or one of the engine's own modes, reduced to its figures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from saguaro_core.answers import first_difference
from saguaro_core.bench_measure import Measurement
from saguaro_core.peers.protocol import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDifference:
    """Where a peer's answer to a prompt parts from ours; a token id is None where an answer has ended.

    `gap` is our token's score minus theirs by the target in float32; None where it was not computed.
    """

    prompt: int
    index: int
    token_ids: tuple[int | None, int | None]
    gap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSpeeds:
    """What the engine did on the same prompts: AR's answers, and each column's tokens per second for every prompt.

    `peak_memory_bytes` is what engine and draft process held at most, together.
    """

    token_ids: Mapping[int, tuple[int, ...]]
    speeds: Mapping[str, Mapping[int, float]]
    first_tokens: Mapping[str, float | None]
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """One peer with one number of threads. Figures are None where undefined or when `error` says why there are none.

    `ratios` are to the engine's columns, the median over prompts of paired ratios. `tried` are the ways that were
    tried, with their tokens per second; `how` is the one that was measured.
    """

    title: str
    num_threads: int
    version: str = ""
    how: str = ""
    arithmetic: str = ""
    tried: Mapping[str, float] = field(default_factory=dict)
    decode_tokens_per_second: float | None = None
    time_to_first_token: float | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    differences: tuple[PeerDifference, ...] | None = None
    peak_memory_bytes: int | None = None
    answers: tuple[Answer, ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None


def own_speeds(measurements: Sequence[Measurement], peak_memory_bytes: int | None = None) -> OwnSpeeds:
    """The engine's side of the comparison; repeats of a prompt are reduced to their median."""
    columns = tuple(dict.fromkeys(m.column for m in measurements))
    runs = {column: [m for m in measurements if m.column == column] for column in columns}
    return OwnSpeeds(
        token_ids={m.prompt: m.finished.token_ids for m in reversed(runs["ar"])},
        speeds={column: _per_prompt(found) for column, found in runs.items()},
        first_tokens={
            column: median_of(m.figures.time_to_first_token for m in found) for column, found in runs.items()
        },
        peak_memory_bytes=peak_memory_bytes,
    )


def _per_prompt(runs: Iterable[Measurement]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for run in runs:
        if run.figures.decode_tokens_per_second is not None:
            found.setdefault(run.prompt, []).append(run.figures.decode_tokens_per_second)
    return {prompt: median(speeds) for prompt, speeds in found.items()}


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of the values that are there; None without any."""
    found = [value for value in values if value is not None]
    return median(found) if found else None


def ratios_to(own: OwnSpeeds, speeds: Mapping[int, float]) -> dict[str, float]:
    """For each of the engine's columns, the median over prompts of these speeds over the column's own."""
    ratios = {}
    for column, mine in own.speeds.items():
        pairs = [speeds[prompt] / mine[prompt] for prompt in speeds if mine.get(prompt)]
        if pairs:
            ratios[column] = median(pairs)
    return ratios


def find_differences(own: OwnSpeeds, answers: Sequence[Answer]) -> tuple[PeerDifference, ...]:
    """Every prompt whose answer is not ours."""
    found = []
    for prompt, answer in enumerate(answers):
        ours, theirs = own.token_ids[prompt], answer.token_ids
        index = first_difference(ours, theirs)
        if index is not None:
            pair = tuple(ids[index] if index < len(ids) else None for ids in (ours, theirs))
            found.append(PeerDifference(prompt=prompt, index=index, token_ids=(pair[0], pair[1])))
    return tuple(found)


def with_figures(row: PeerRow, own: OwnSpeeds, answers: Sequence[Answer]) -> PeerRow:
    """The row with the figures of its answers."""
    speeds = {i: s for i, answer in enumerate(answers) if (s := answer.decode_tokens_per_second) is not None}
    return replace(
        row,
        decode_tokens_per_second=median_of(speeds.values()),
        time_to_first_token=median_of(answer.times[0] for answer in answers if answer.times),
        ratios=ratios_to(own, speeds),
        differences=find_differences(own, answers),
        answers=tuple(answers),
    )
