"""Runs every peer on the engine's prompts: first briefly in each way of using it, then fully in the fastest.

Each peer runs with as many threads as the target has, and again with all cores that target and draft have together,
since SSD uses them all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from saguaro_core.bench_measure import BenchPlan
from saguaro_core.config import EngineConfig
from saguaro_core.errors import ModelError
from saguaro_core.models.progress import Progress
from saguaro_core.peers.gguf_file import fetch_gguf
from saguaro_core.peers.judge import Question, ask_judge
from saguaro_core.peers.kinds import PEERS, Launcher, PeerKind, PeerOptions
from saguaro_core.peers.launch import PeerFailed, run_job
from saguaro_core.peers.protocol import Job, Variant, VariantResult, pooled_tokens_per_second
from saguaro_core.peers.rows import OwnSpeeds, PeerDifference, PeerRow, with_figures
from saguaro_core.status import EngineInfo

NUM_TRIAL_PROMPTS = 2
NUM_TRIAL_TOKENS = 16
# llama.cpp's Llama graph has no bias on the output and one row for each token: a trimmed head does not fit.
NO_LLAMA_DRAFT = (
    "llama.cpp with the same draft was not run: its Llama graph takes a head over the whole vocabulary without a bias, "
    "which a trimmed head is not."
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerComparison:
    """All rows, the engine's own figures that they are compared with, and what else must be known."""

    own: OwnSpeeds
    rows: tuple[PeerRow, ...]
    core_sets: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...] = ()


def compare_peers(
    own: OwnSpeeds,
    plan: BenchPlan,
    config: EngineConfig,
    info: EngineInfo,
    options: PeerOptions,
    say: Say,
    *,
    peers: Sequence[PeerKind] = PEERS,
) -> PeerComparison:
    """Run the peers once the engine has ended; one that fails says so in its row. Raises ModelError."""
    # Here and not above: the benchmark itself needs no tokenizer.
    from saguaro_core.peers.prepare import prepare

    core_sets = _core_sets(info)
    if not core_sets:
        note = f"peers are measured on CPU cores; the target runs on {info.target.device}."
        return PeerComparison(own=own, rows=(), core_sets=(), notes=(note,))
    prepared = prepare(config.target, plan.prompts)
    job = Job(
        peer="",
        variants=(),
        prompts=prepared.prompts,
        warm_up=prepared.warm_up,
        max_new_tokens=plan.sampling.max_new_tokens,
        eos_token_ids=prepared.eos_token_ids,
        cores=(),
        target=config.target,
        draft=config.draft,
    )
    comparer = _Comparer(own, job, options, plan.speculation.lookahead, say)
    rows = [row for kind in peers for row in comparer.rows_of(kind, core_sets)]
    judged = _judged(rows, job, own, core_sets[-1], options.timeout)
    return PeerComparison(own=own, rows=tuple(judged), core_sets=core_sets, notes=(NO_LLAMA_DRAFT,))


def _core_sets(info: EngineInfo) -> tuple[tuple[int, ...], ...]:
    """The target's cores, then the cores of the pair where those are more; none when the target is on no CPU."""
    if not info.target.cores:
        return ()
    draft = info.draft.cores if info.draft is not None else ()
    together = tuple(sorted({*info.target.cores, *draft}))
    return (info.target.cores,) if len(together) == len(info.target.cores) else (info.target.cores, together)


class _Comparer:
    """Runs one peer after the other on the same job."""

    def __init__(self, own: OwnSpeeds, job: Job, options: PeerOptions, lookahead: int, say: Say) -> None:
        self._own, self._job, self._options, self._lookahead, self._say = own, job, options, lookahead, say

    def rows_of(self, kind: PeerKind, core_sets: Sequence[tuple[int, ...]]) -> list[PeerRow]:
        """The peer's rows, one for each set of cores, or one that says why there are none."""
        launcher = kind.find(self._options)
        if isinstance(launcher, str):
            return [PeerRow(title=kind.title, num_threads=0, error=launcher)]
        try:
            file = fetch_gguf(self._job.target, on_progress=_once(self._say)) if kind.needs_gguf else None
        except ModelError as error:
            return [PeerRow(title=kind.title, num_threads=0, error=str(error))]
        return [self._row(kind, launcher, file, cores) for cores in core_sets]

    def _row(self, kind: PeerKind, launcher: Launcher, file: Path | None, cores: tuple[int, ...]) -> PeerRow:
        row = PeerRow(title=kind.title, num_threads=len(cores), version=launcher.version)
        job = replace(
            self._job,
            peer=kind.name,
            cores=cores,
            model_file="" if file is None else str(file),
            module_folder=launcher.module_folder,
        )
        name = f"{kind.title}, threads: {len(cores)}"
        try:
            self._say(f"{name}: looking for the fastest way")
            variant, tried = self._choose(kind, launcher, job)
            self._say(f"{name}: {variant.name}")
            output = run_job(launcher, replace(job, variants=(variant,)), self._options.timeout)
            result = _successful(output.results[0])
        except PeerFailed as error:
            return replace(row, error=str(error))
        described = replace(
            row,
            how=variant.name,
            arithmetic=kind.arithmetic or f"{variant.options['dtype']} arithmetic",
            tried=tried,
            peak_memory_bytes=output.peak_memory_bytes,
            notes=result.notes,
        )
        return with_figures(described, self._own, result.answers)

    def _choose(self, kind: PeerKind, launcher: Launcher, job: Job) -> tuple[Variant, dict[str, float]]:
        """The fastest variant on a few tokens, and what each of them did. Raises PeerFailed if none works."""
        variants = kind.variants(self._options, self._lookahead)
        trial = replace(
            job,
            variants=variants,
            prompts=job.prompts[:NUM_TRIAL_PROMPTS],
            max_new_tokens=min(job.max_new_tokens, NUM_TRIAL_TOKENS),
        )
        results = run_job(launcher, trial, self._options.timeout).results
        speeds = {
            variant.name: pooled_tokens_per_second(result.answers)
            for variant, result in zip(variants, results, strict=True)
            if result.error is None
        }
        if not speeds:
            _successful(results[0])
        return max(variants, key=lambda variant: speeds.get(variant.name, -1.0)), speeds


def _once(say: Say) -> Progress:
    """Say each message once, however often it comes."""
    said: set[str] = set()

    def progress(message: str, share: float | None) -> None:
        if message not in said:
            said.add(message)
            say(message)

    return progress


def _successful(result: VariantResult) -> VariantResult:
    if result.error is not None:
        raise PeerFailed(result.error)
    return result


def _judged(rows: Sequence[PeerRow], job: Job, own: OwnSpeeds, cores: tuple[int, ...], timeout: float) -> list[PeerRow]:
    """The rows with the score gap of each one's earliest difference, where both answers went on."""
    earliest = {
        index: min(row.differences, key=lambda difference: difference.index)
        for index, row in enumerate(rows)
        if row.differences
    }
    asked = {i: d for i, d in earliest.items() if None not in d.token_ids}
    gaps = ask_judge(job.target, [_question(d, job, own) for d in asked.values()], cores, timeout)
    judged = list(rows)
    for (index, difference), gap in zip(asked.items(), gaps, strict=True):
        others = tuple(d for d in rows[index].differences or () if d is not difference)
        judged[index] = replace(rows[index], differences=(replace(difference, gap=gap), *others))
    return judged


def _question(difference: PeerDifference, job: Job, own: OwnSpeeds) -> Question:
    ours, theirs = difference.token_ids
    assert ours is not None
    assert theirs is not None
    context = (*job.prompts[difference.prompt], *own.token_ids[difference.prompt][: difference.index])
    return Question(context=context, ours=ours, theirs=theirs)
