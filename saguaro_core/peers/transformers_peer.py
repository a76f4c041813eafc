"""transformers' own `generate`: plain, assisted by the same draft, and with prompt lookup.

The weights are the ones that the engine reads (float16 on disk), held in the variant's dtype.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from saguaro_core.models.load import load_draft, load_target
from saguaro_core.peers.assistant import ScatteredHead, make_assistant, scatter_milliseconds
from saguaro_core.peers.protocol import Answer, Job, Option, Variant, VariantResult

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class _Clock(BaseStreamer):
    """Notes when generate hands tokens out; the first call brings the prompt."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        ids = value.flatten().tolist()
        self.token_ids += ids
        self.times += [time.perf_counter() - self.start] * len(ids)

    def end(self) -> None:
        """Nothing is held back."""


def decode(job: Job, variant: Variant) -> VariantResult:
    """Warm up, then answer every prompt of the job."""
    options = variant.options
    model = load_target(job.target, dtype=_dtype(options)).model
    model.set_attn_implementation(str(options.get("attention", "sdpa")))
    keywords, notes = _mode_keywords(job, options)
    model.generation_config = GenerationConfig(do_sample=False)
    decoder = _Decoder(model, job, keywords)
    decoder.answer(job.warm_up, job.warm_up_tokens)
    answers = tuple(decoder.answer(prompt, job.max_new_tokens) for prompt in job.prompts)
    return VariantResult(answers=answers, notes=notes)


class _Length(StoppingCriteria):
    """Ends an answer at a length below the cache's."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self._length, dtype=torch.bool)


class _Decoder:
    """Calls generate for one prompt after another, all with the same settings."""

    def __init__(self, model: PreTrainedModel, job: Job, keywords: Mapping[str, Any]) -> None:
        eos = list(job.eos_token_ids) or None
        self._job = job
        self._generate: Any = model.generate
        self._keywords = {"eos_token_id": eos, "pad_token_id": eos[0] if eos else 0, "do_sample": False, **keywords}

    def answer(self, prompt: tuple[int, ...], max_new_tokens: int) -> Answer:
        """The greedy answer to one prompt."""
        ids = torch.tensor([prompt])
        limit = self._limit(len(prompt) + max_new_tokens)
        clock = _Clock()
        with torch.inference_mode():
            self._generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **limit, **self._keywords)
        return Answer(token_ids=tuple(clock.token_ids), times=tuple(clock.times))

    def _limit(self, length: int) -> dict[str, Any]:
        """A static cache gets one size for all prompts, so that nothing is compiled twice."""
        if "cache_implementation" not in self._keywords:
            return {"max_length": length}
        return {"max_length": self._job.context_length, "stopping_criteria": StoppingCriteriaList([_Length(length)])}


def _dtype(options: Mapping[str, Option]) -> torch.dtype:
    return _DTYPES[str(options.get("dtype", "float32"))]


def _mode_keywords(job: Job, options: Mapping[str, Option]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What makes generate work in the job's way, and what is worth telling about it."""
    if job.peer == "transformers-lookup":
        return {"prompt_lookup_num_tokens": int(options["lookup_tokens"])}, ()
    if job.peer == "transformers-assisted":
        assistant, notes = _assistant(job, options)
        return {"assistant_model": assistant}, notes
    if not options.get("compile"):
        return {"cache_implementation": "static"} if options.get("static_cache") else {}, ()
    compiled = CompileConfig(mode="default")
    compiled._compile_all_devices = True  # type: ignore[assignment] # Without it generate compiles on GPUs only.
    return {"cache_implementation": "static", "compile_config": compiled}, ()


def _assistant(job: Job, options: Mapping[str, Option]) -> tuple[PreTrainedModel, tuple[str, ...]]:
    model = make_assistant(load_draft(job.draft, target_name=job.target, dtype=_dtype(options)))
    model.generation_config = GenerationConfig(do_sample=False)
    if "assistant_tokens" in options:
        model.generation_config.num_assistant_tokens = int(options["assistant_tokens"])
        model.generation_config.num_assistant_tokens_schedule = "constant"
        model.generation_config.assistant_confidence_threshold = 0.0
    head = model.get_output_embeddings()
    if not isinstance(head, ScatteredHead):
        return model, ()
    cost = scatter_milliseconds(head, _dtype(options))
    rows, size = head.get_buffer("token_ids").numel(), head.vocabulary_size
    note = f"scattering the draft's {rows} scores to {size} tokens takes {cost:.2f} ms per drafted token"
    return model, (note,)
