"""The figures of one run as plain data.

Names follow vLLM's speculative-decoding metrics. A figure that is not defined (no draft, one token only) is None
and shown as "n/a", never as 0. `figures.py` computes them; they stand apart from it because every RunFinished event
carries them and the computation reads events.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Totals of a run. Rates are 0..1, times in seconds unless the name ends in _ms.

    decode_tokens_per_second counts the tokens committed after the first commit, over the time since it.
    num_spec_steps counts rounds with drafted tokens. draft_acceptance_rate is accepted / drafted without the bonus;
    drafted tokens behind the end of the answer are in neither. mean_acceptance_length is tokens per such round,
    1 + accepted; acceptance_histogram[k] counts the rounds that accepted k. cache_hit_rate is hits / (hits + misses):
    the first round is a compulsory miss and is left out. mean_step_ms is one forward of SD's draft;
    mean_build_ms and mean_fallback_ms are the draft's time per round that had such work. build_overlap is the share
    of the draft's build time that lies inside the target's verifications. mean_round_ms is the time from one commit
    to the next: verification, wait and the bookkeeping that neither of them holds.

    num_reused_prompt_tokens and num_reused_draft_tokens are prompt tokens that target and draft found in their caches.
    num_rounds_full, _short and _plain count SSD's rounds by how much of a speculation was served. fitted_acceptance_*
    and fitted_power_law_r_* are a and r of Theorem 12 as the draft fitted them, for speculations from the cache and
    after a miss; critical_batch_size is b* of Theorem 17 by the run's own times, None if the fast backup never wins.
    """

    num_tokens: int = 0
    elapsed: float = 0.0
    time_to_first_token: float | None = None
    decode_tokens_per_second: float | None = None
    tokens_per_second_per_device: float | None = None
    num_devices: int = 1
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    draft_acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    acceptance_histogram: tuple[int, ...] = ()
    num_cache_hits: int = 0
    num_cache_misses: int = 0
    cache_hit_rate: float | None = None
    mean_verify_ms: float | None = None
    mean_step_ms: float | None = None
    mean_build_ms: float | None = None
    mean_fallback_ms: float | None = None
    mean_wait_ms: float | None = None
    build_overlap: float | None = None
    mean_acceptance_length_hit: float | None = None
    mean_acceptance_length_miss: float | None = None
    num_rounds: int = 0
    mean_round_ms: float | None = None
    num_reused_prompt_tokens: int | None = None
    num_reused_draft_tokens: int | None = None
    num_rounds_full: int = 0
    num_rounds_short: int = 0
    num_rounds_plain: int = 0
    fitted_acceptance_hit: float | None = None
    fitted_acceptance_miss: float | None = None
    fitted_power_law_r_hit: float | None = None
    fitted_power_law_r_miss: float | None = None
    critical_batch_size: int | None = None
