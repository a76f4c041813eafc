"""What do rounds cost end to end: AR, SD and SSD with target and draft in processes of their own, as in the engine?

Random weights in the shapes of an 8B and a 1B model; acceptance and hits are forced by a script, the times are real.
"""

import torch

from saguaro_core.checks.local import Decoded, LocalEngine
from saguaro_core.checks.oracle import OracleRunner
from saguaro_core.checks.random_models import LLAMA_1B, LLAMA_8B, TINY, Shape, make_fixed_runner, make_random_model
from saguaro_core.checks.rows import Problems, Row, Setting, reported_in
from saguaro_core.config import MODES, Mode, SamplingParams, SpeculationConfig
from saguaro_core.draft.handle import DraftHandle
from saguaro_core.draft.messages import LoadDraft
from saguaro_core.figures import RunFigures
from saguaro_core.gpu_check_draft import script_for
from saguaro_core.gpu_check_forwards import BUDGET, LOOKAHEAD
from saguaro_core.models.placement import available_cores
from saguaro_core.models.runner import Runner
from saguaro_core.theory import predict

_PROMPT_LENGTH = 256
_NAME = "rounds, forced acceptance: {}"
_LOAD_SECONDS = 90.0


def _start_draft(shape: Shape, device: str) -> DraftHandle:
    """The check's draft in its own process, loading."""
    draft = DraftHandle(_LOAD_SECONDS, "saguaro_core.gpu_check_draft")
    cores = available_cores()[-1:] if device == "cpu" else ()
    draft.start(LoadDraft(draft=shape.name, target="", device=device, cores=cores))
    return draft


def check_rounds(setting: Setting) -> list[Row]:
    """A row for each mode, and one for what SSD hides."""
    rows: list[Row] = []
    is_full = setting.is_cuda and not setting.is_tiny
    target_shape, draft_shape = (LLAMA_8B, LLAMA_1B) if is_full else (TINY, TINY)
    with reported_in(rows, _NAME.format("both processes")):
        draft = _start_draft(draft_shape, setting.last)
        try:
            target = _make_target(target_shape, setting.first)
            draft.wait_loaded()
            engine = LocalEngine(target, draft, setting.first, num_devices=1 if setting.first == setting.last else 2)
            rows += _measure(engine, setting, 256 if is_full else 32)
        finally:
            draft.close()
    return rows


def _make_target(shape: Shape, device: str) -> Runner:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    runner = make_fixed_runner(make_random_model(shape, device, dtype), device)
    runner.prepare()
    return OracleRunner(runner, (script_for(shape).target_ids(),))


def _measure(engine: LocalEngine, setting: Setting, num_tokens: int) -> list[Row]:
    assert isinstance(engine.target, OracleRunner)
    script = engine.target.choices[0].tolist()
    prompt, expected = script[:_PROMPT_LENGTH], tuple(script[_PROMPT_LENGTH : _PROMPT_LENGTH + num_tokens])
    # What a random draft thinks of its tokens, and what the text suggests, has nothing to do with a forced acceptance.
    speculation = SpeculationConfig(
        lookahead=LOOKAHEAD, budget=BUDGET, fan_out="geometric", copying="off", fallback="neural", service="ready"
    )
    for mode in MODES:  # A first run of each meets shapes that were not prepared, and fills the caches.
        engine.run(mode, prompt, SamplingParams(max_new_tokens=num_tokens // 4), speculation)
    runs = {mode: engine.run(mode, prompt, SamplingParams(max_new_tokens=num_tokens), speculation) for mode in MODES}
    rows = [_mode_row(mode, run, expected, setting) for mode, run in runs.items()]
    return [*rows, _overlap_row(runs, setting)]


def _mode_row(mode: Mode, run: Decoded, expected: tuple[int, ...], setting: Setting) -> Row:
    figures, problems = run.finished.figures, Problems()
    problems.expect(run.token_ids == expected, "the answer is not the script's")
    parts = [f"{_show(figures.decode_tokens_per_second)} tokens/s", f"verify {_show(figures.mean_verify_ms)} ms"]
    if mode != "ar":
        parts.append(f"{_show(figures.mean_acceptance_length)} tokens per speculated round (forced)")
    if mode == "sd":
        parts.append(f"draft step {_show(figures.mean_step_ms)} ms")
    if mode == "ssd":
        # On a CPU a tiny draft is no faster than a tiny target, so its cache may always come too late.
        problems.expect((figures.cache_hit_rate or 0) > 0 or not setting.is_cuda, "no round hit the cache")
        parts.append(f"hit rate {_show(figures.cache_hit_rate)} (ranks forced)")
        parts.append(f"build {_show(figures.mean_build_ms)} ms")
        parts.append(f"fallback {_show(figures.mean_fallback_ms)} ms")
    if mode != "ar":
        parts.append(f"wait {_show(figures.mean_wait_ms)} ms")
    row = problems.row(_NAME.format(mode.upper()), f"{', '.join(parts)}; {setting.places}", _data(figures))
    return row if row.result == "failed" else Row(row.check, "measured", row.detail, row.data)


def _overlap_row(runs: dict[Mode, Decoded], setting: Setting) -> Row:
    ar, sd, ssd = (runs[mode].finished.figures for mode in MODES)
    predicted = predict(ssd, ar=ar, sd=sd)
    over_ar = _ratio(ssd.decode_tokens_per_second, ar.decode_tokens_per_second)
    over_sd = _ratio(ssd.decode_tokens_per_second, sd.decode_tokens_per_second)
    parts = (
        f"{_show(ssd.build_overlap)} of the build lies inside verifications",
        f"SSD/AR {_show(over_ar)} (predicted {_show(predicted.ssd_over_ar)})",
        f"SSD/SD {_show(over_sd)} (predicted {_show(predicted.ssd_over_sd)})",
    )
    note = "" if setting.first != setting.last else "; sharing one device, the two processes take turns on it"
    data = {"build_overlap": ssd.build_overlap, "ssd_over_ar": over_ar, "ssd_over_sd": over_sd}
    return Row(_NAME.format("overlap"), "measured", f"{', '.join(parts)}{note}", data)


def _data(figures: RunFigures) -> dict[str, float | None]:
    names = ("decode_tokens_per_second", "mean_verify_ms", "mean_step_ms", "mean_build_ms", "mean_fallback_ms")
    return {name: getattr(figures, name) for name in (*names, "mean_wait_ms", "cache_hit_rate", "build_overlap")}


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _show(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"
