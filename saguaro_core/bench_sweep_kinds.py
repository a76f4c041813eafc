"""The sweeps over one setting: C of Saguaro's sampling, lookahead, and fallback."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import get_args

from saguaro_core.bench_report import BenchReport, ModeSummary, summarise
from saguaro_core.bench_sweep_run import Runs, SweepPlan, SweepPoint, SweepReport, summaries, table
from saguaro_core.bench_table import number, percent
from saguaro_core.config import FallbackPolicy, Mode, VerificationRule
from saguaro_core.errors import InvalidRequest
from saguaro_core.theory import Backup, critical_batch_size

CS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
LOOKAHEADS = (1, 2, 3, 4, 5, 6)


def why_c_means_nothing(rule: VerificationRule, temperature: float) -> str | None:
    """Why Saguaro's sampling cannot do anything under these settings, or None where it can."""
    if rule == "shared_noise":
        return "rule is 'shared_noise': no draft distribution enters that rule, so there is none to reshape by C."
    if temperature == 0.0:
        return "temperature is 0: the draft draws nothing then, so there is no distribution to reshape by C."
    return None


class SaguaroSweep:
    """C from 0 to 1 (Definition 14): less draft mass on the cached tokens, more hits, fewer acceptances."""

    def check(self, plan: SweepPlan) -> None:
        """Refuse settings under which C has no meaning."""
        reason = why_c_means_nothing(plan.speculation.rule, plan.sampling.temperature)
        if reason is not None:
            raise InvalidRequest(f"{reason} Give --rule rejection and a --temperature above 0.")

    def stages(self, plan: SweepPlan, runs: Runs) -> Iterator[list[SweepPoint]]:
        """All at once."""
        yield [SweepPoint(name=f"{c:g}", speculation=replace(plan.speculation, saguaro_c=c)) for c in CS]

    def report(self, plan: SweepPlan, runs: Runs) -> SweepReport:
        """Acceptance and hit rate side by side; what C is refused for is said below."""
        head = ("C", "acceptance", "hit rate", "tokens/speculated round", "tokens/s")
        rows = [
            [
                name,
                percent(summary.draft_acceptance_rate),
                percent(summary.cache_hit_rate),
                number(summary.mean_acceptance_length),
                number(summary.decode_tokens_per_second, 1),
            ]
            for name, summary in summaries(runs).items()
        ]
        refusals = [
            f"refused: {why_c_means_nothing('shared_noise', plan.sampling.temperature)}",
            f"refused: {why_c_means_nothing('rejection', 0.0)}",
        ]
        return SweepReport(lines=[*table(head, rows), "", *refusals], data={"refusals": refusals})


class LookaheadSweep:
    """K for SD and SSD beside AR, paired by prompt."""

    def check(self, plan: SweepPlan) -> None:
        """It means something under all settings."""

    def stages(self, plan: SweepPlan, runs: Runs) -> Iterator[list[SweepPoint]]:
        """All at once. An explicit list would fit one K only, so the shape is geometric."""
        base = replace(plan.speculation, fan_out="geometric", fan_out_list=())
        modes: tuple[Mode, ...] = ("sd", "ssd")
        yield [
            SweepPoint(name="ar", speculation=base, mode="ar"),
            *(
                SweepPoint(name=f"{mode} {k}", speculation=replace(base, lookahead=k), mode=mode)
                for k in LOOKAHEADS
                for mode in modes
            ),
        ]

    def report(self, plan: SweepPlan, runs: Runs) -> SweepReport:
        """One row for each K; ratios are medians over prompts, predictions come from the runs' own figures."""
        ratios_head = ("SSD/SD", "predicted", "SSD/AR", "predicted")
        head = ("K", "SD tok/s", "SSD tok/s", *ratios_head, "acceptance", "hit rate", "SD verify ms", "SSD verify ms")
        reports = {k: self._at(plan, runs, k) for k in LOOKAHEADS if f"ssd {k}" in runs and f"sd {k}" in runs}
        rows = [self._row(k, report) for k, report in reports.items()]
        ratios = {k: {name: asdict(r) for name, r in report.ratios.items()} for k, report in reports.items()}
        return SweepReport(lines=table(head, rows), data={"ratios": ratios})

    @staticmethod
    def _at(plan: SweepPlan, runs: Runs, k: int) -> BenchReport:
        measurements = [replace(m, column=m.mode) for name in ("ar", f"sd {k}", f"ssd {k}") for m in runs.get(name, ())]
        return summarise(measurements, plan.prompts)

    @staticmethod
    def _row(k: int, report: BenchReport) -> list[str]:
        sd, ssd = report.modes["sd"], report.modes["ssd"]
        cells = [str(k), number(sd.decode_tokens_per_second, 1), number(ssd.decode_tokens_per_second, 1)]
        for name in ("ssd_over_sd", "ssd_over_ar"):
            cells += [number(report.ratios[name].median), number(report.ratios[name].predicted)]
        rates = [percent(ssd.draft_acceptance_rate), percent(ssd.cache_hit_rate)]
        return [*cells, *rates, number(sd.mean_verify_ms, 1), number(ssd.mean_verify_ms, 1)]


class FallbackSweep:
    """What serves a miss: the draft itself, lookup, or whichever the measured times favour."""

    def check(self, plan: SweepPlan) -> None:
        """It means something under all settings."""

    def stages(self, plan: SweepPlan, runs: Runs) -> Iterator[list[SweepPoint]]:
        """All at once."""
        policies: tuple[FallbackPolicy, ...] = get_args(FallbackPolicy)
        yield [SweepPoint(name=policy, speculation=replace(plan.speculation, fallback=policy)) for policy in policies]

    def report(self, plan: SweepPlan, runs: Runs) -> SweepReport:
        """One row for each policy, then the batch size from which the fast one wins by these figures."""
        head = (
            "fallback",
            "tokens/s",
            "hit rate",
            "after a hit",
            "after a miss",
            "its ms",
            "wait ms, misses",
            "served by",
        )
        found = summaries(runs)
        rows = [self._row(name, summary) for name, summary in found.items()]
        batch_size = _critical_batch_size(found)
        said = "never" if batch_size is None else f"from batch size {batch_size} on"
        lines = [*table(head, rows), ""]
        if {"neural", "fast"} <= set(found):
            lines.append(f"fast wins {said} (b* of Theorem 17 from the figures above)")
        return SweepReport(lines=lines, data={"critical_batch_size": batch_size})

    @staticmethod
    def _row(name: str, summary: ModeSummary) -> list[str]:
        rounds = summary.rounds
        kinds = ", ".join(f"{kind} {count}" for kind, count in rounds.fallback_kinds.items())
        return [
            name,
            number(summary.decode_tokens_per_second, 1),
            percent(summary.cache_hit_rate),
            number(rounds.tokens_after_hit),
            number(rounds.tokens_after_miss),
            number(summary.mean_fallback_ms, 1),
            number(rounds.median_wait_ms_miss, 1),
            kinds or "n/a",
        ]


def _critical_batch_size(found: dict[str, ModeSummary]) -> int | None:
    """b* of Theorem 17 from both points' figures; None where one of them is missing, or fast never wins."""
    neural, fast = found.get("neural"), found.get("fast")
    if neural is None or fast is None or not neural.mean_verify_ms or not fast.mean_verify_ms:
        return None
    if neural.cache_hit_rate is None or neural.rounds.tokens_after_hit is None:
        return None
    return critical_batch_size(
        neural.cache_hit_rate,
        neural.rounds.tokens_after_hit,
        _backup(neural, neural.mean_verify_ms),
        _backup(fast, fast.mean_verify_ms),
        (neural.mean_build_ms or 0.0) / neural.mean_verify_ms,
    )


def _backup(summary: ModeSummary, verify_ms: float) -> Backup:
    return Backup(
        tokens_per_round=summary.rounds.tokens_after_miss or 1.0, time=(summary.mean_fallback_ms or 0.0) / verify_ms
    )
