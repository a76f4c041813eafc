"""What every figure means, in words, for exports that are read far from this program."""

METRIC_DEFINITIONS: dict[str, str] = {
    "num_tokens": "committed tokens of the answer, the one that ended it included",
    "elapsed": "seconds from the run's start (it left the queue) to its end",
    "time_to_first_token": "seconds from the run's start to the first commit",
    "decode_tokens_per_second": "tokens committed after the first commit / seconds from the first commit to the last",
    "tokens_per_second_per_device": "decode_tokens_per_second / num_devices",
    "num_devices": "places that worked at the same time: the target's, sharded or not, and under SSD the draft's",
    "num_spec_steps": "rounds in which at least one token was drafted",
    "num_draft_tokens": "drafted tokens, without bonus tokens and without those behind the answer's end",
    "num_accepted_draft_tokens": "drafted tokens that the target accepted, without the bonus tokens",
    "draft_acceptance_rate": "num_accepted_draft_tokens / num_draft_tokens",
    "mean_acceptance_length": "mean tokens per round with drafted tokens: 1 + accepted",
    "acceptance_histogram": "entry k counts the rounds that accepted k drafted tokens",
    "num_cache_hits": "rounds whose speculation was prepared in the cache",
    "num_cache_misses": "rounds whose speculation was not prepared, the first (compulsory) round left out",
    "cache_hit_rate": "num_cache_hits / (num_cache_hits + num_cache_misses)",
    "mean_verify_ms": "mean milliseconds of the target's verification per round",
    "mean_step_ms": "mean milliseconds of one draft step",
    "mean_build_ms": "mean milliseconds of building the speculation cache for one round",
    "mean_fallback_ms": "mean milliseconds of a fallback speculation after a miss",
    "mean_wait_ms": "mean milliseconds per round that the target waited for a speculation",
    "build_overlap": "share of the draft's build time that lies inside the target's verifications",
    "mean_acceptance_length_hit": "mean_acceptance_length over the rounds after a cache hit",
    "mean_acceptance_length_miss": "mean_acceptance_length over the rounds after a cache miss",
    "num_rounds": "forward passes of the target over 1 + drafted tokens",
    "mean_round_ms": "mean milliseconds from one round's commit to the next one's",
}

UNDEFINED = "A figure that is not defined for a run is null (an empty CSV cell), never 0."
TIMES = "Columns ending in _s are seconds since the run's start, _ms milliseconds, _at UTC in ISO 8601."
