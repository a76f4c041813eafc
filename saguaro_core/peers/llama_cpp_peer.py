"""llama.cpp through llama-cpp-python, on the GGUF file that the target's weights come from."""

import time
from importlib import import_module
from typing import Any

from saguaro_core.peers.protocol import Answer, Job, Variant, VariantResult


def decode(job: Job, variant: Variant) -> VariantResult:
    """Warm up, then answer every prompt of the job."""
    llama = _load(job, variant)
    _answer(llama, job, job.warm_up, job.warm_up_tokens)
    return VariantResult(answers=tuple(_answer(llama, job, prompt, job.max_new_tokens) for prompt in job.prompts))


def _load(job: Job, variant: Variant) -> Any:
    draft = None
    if job.peer == "llama-lookup":
        lookup = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
        draft = lookup(num_pred_tokens=int(variant.options["lookup_tokens"]))
    return import_module("llama_cpp").Llama(
        job.model_file,
        n_ctx=job.context_length,
        n_threads=len(job.cores),
        n_threads_batch=len(job.cores),
        flash_attn=bool(variant.options.get("flash_attention", False)),
        draft_model=draft,
        verbose=False,
    )


def _answer(llama: Any, job: Job, prompt: tuple[int, ...], max_new_tokens: int) -> Answer:
    llama.reset()
    start = time.perf_counter()
    token_ids: list[int] = []
    times: list[float] = []
    for token_id in llama.generate(list(prompt), temp=0.0, top_k=1):
        token_ids.append(int(token_id))
        times.append(time.perf_counter() - start)
        if token_ids[-1] in job.eos_token_ids or len(token_ids) == max_new_tokens:
            break
    return Answer(token_ids=tuple(token_ids), times=tuple(times))
