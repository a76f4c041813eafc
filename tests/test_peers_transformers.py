"""transformers as a peer, on tiny random models: every way of using it gives the target's own greedy tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_trimmed import save_trimmed_draft

from saguaro_core.models.load import load_draft, load_target
from saguaro_core.peers.assistant import ScatteredHead, make_assistant
from saguaro_core.peers.child import do_job
from saguaro_core.peers.judge import Question, Questions, score_gaps
from saguaro_core.peers.kinds import PEERS, PeerOptions, find_transformers
from saguaro_core.peers.launch import run_job
from saguaro_core.peers.protocol import Answer, Job, Variant

PROMPTS = ((5, 6, 7, 8, 9, 10, 5, 6, 7), (40, 41, 42, 43))
NUM_TOKENS = 12
HEAD = [3, 4, 5, 7, 11, *range(20, 200)]
PEER_NAMES = [peer.name for peer in PEERS if not peer.needs_gguf]


@pytest.fixture
def job(tiny_llama: Callable[..., Path], tmp_path: Path) -> Job:
    target = tiny_llama("target", eos_token_id=None)
    draft, _ = save_trimmed_draft(tmp_path / "draft", target, token_ids=HEAD)
    return Job(
        peer="transformers",
        variants=(Variant(name="float32", options={"dtype": "float32"}),),
        prompts=PROMPTS,
        warm_up=(5, 6),
        max_new_tokens=NUM_TOKENS,
        eos_token_ids=(),
        cores=(0,),
        target=str(target),
        draft=str(draft),
    )


@torch.inference_mode()
def greedy(target: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The target's tokens, every one by a forward over the whole context."""
    model: Any = load_target(target, dtype=torch.float32).model
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def answers_of(job: Job, *variants: Variant) -> list[tuple[Answer, ...]]:
    output = do_job(replace(job, variants=variants))
    assert [result.error for result in output.results] == [None] * len(variants)
    return [result.answers for result in output.results]


@pytest.mark.parametrize("name", PEER_NAMES)
def test_every_way_in_float32_gives_the_greedy_tokens(job: Job, name: str) -> None:
    kind = next(peer for peer in PEERS if peer.name == name)
    variants = [v for v in kind.variants(PeerOptions(), 3) if v.options["dtype"] == "float32"]
    expected = tuple(greedy(job.target, prompt) for prompt in PROMPTS)
    for answers in answers_of(replace(job, peer=name), *variants):
        assert tuple(answer.token_ids for answer in answers) == expected
        assert all(len(answer.times) == NUM_TOKENS for answer in answers)
        assert all(list(answer.times) == sorted(answer.times) for answer in answers)


def test_a_draft_that_is_the_target_is_accepted_in_blocks(job: Job) -> None:
    variant = Variant(name="3", options={"dtype": "float32", "assistant_tokens": 3})
    [answers] = answers_of(replace(job, peer="transformers-assisted", draft=job.target), variant)
    assert len(set(answers[0].times)) == NUM_TOKENS // 4


def test_half_precision_ways_answer_too(job: Job) -> None:
    for answers in answers_of(job, *(Variant(name=d, options={"dtype": d}) for d in ("float16", "bfloat16"))):
        assert [len(answer.token_ids) for answer in answers] == [NUM_TOKENS, NUM_TOKENS]


def test_an_answer_ends_with_its_end_token(job: Job) -> None:
    expected = greedy(job.target, PROMPTS[0])
    end = expected[4]
    [answers] = answers_of(replace(job, eos_token_ids=(end, 258)), *job.variants)
    assert answers[0].token_ids == expected[: expected.index(end) + 1]


def test_a_variant_that_fails_says_so_and_the_next_one_runs(job: Job) -> None:
    variants = (Variant(name="unknown", options={"dtype": "float1"}), *job.variants)
    results = do_job(replace(job, variants=variants)).results
    assert results[0].error == "KeyError: 'float1'"
    assert results[1].error is None
    results = do_job(replace(job, target=job.target + "-missing")).results
    assert "There is no folder" in str(results[0].error)


def test_a_trimmed_head_is_scattered_to_the_targets_tokens(job: Job, tmp_path: Path) -> None:
    embedding = load_file(Path(job.target) / "model.safetensors")["model.embed_tokens.weight"]
    _, expected = save_trimmed_draft(tmp_path / "again", Path(job.target), token_ids=HEAD, embedding=embedding)
    assistant: Any = make_assistant(load_draft(job.draft, target_name=job.target, dtype=torch.float32))
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        logits, trimmed = assistant(input_ids=ids).logits, expected(ids)
    assert isinstance(assistant.get_output_embeddings(), ScatteredHead)
    assert logits.shape == (1, len(PROMPTS[0]), assistant.config.vocab_size)
    assert torch.allclose(logits[..., HEAD], trimmed, atol=1e-5)
    others = [i for i in range(assistant.config.vocab_size) if i not in HEAD]
    assert bool((logits[..., others] == -torch.inf).all())


def test_the_cost_of_scattering_is_told(job: Job) -> None:
    variant = Variant(name="3", options={"dtype": "float32", "assistant_tokens": 3})
    [result] = do_job(replace(job, peer="transformers-assisted", variants=(variant,))).results
    assert f"scattering the draft's {len(HEAD)} scores to 259 tokens takes" in result.notes[0]


def test_the_judge_measures_how_far_two_tokens_are_apart(job: Job) -> None:
    model: Any = load_target(job.target, dtype=torch.float32).model
    with torch.inference_mode():
        scores = model(input_ids=torch.tensor([PROMPTS[1]])).logits[0, -1]
    first, second = (int(i) for i in scores.topk(2).indices)
    asked = Questions(target=job.target, questions=(Question(context=PROMPTS[1], ours=second, theirs=first),))
    assert score_gaps(asked) == pytest.approx([float(scores[second] - scores[first])], abs=1e-5)


def test_the_process_of_a_peer_takes_a_job_and_tells_its_memory(job: Job) -> None:
    launcher = find_transformers(PeerOptions())
    assert not isinstance(launcher, str)
    output = run_job(launcher, job, timeout=120)
    assert [answer.token_ids for answer in output.results[0].answers] == [greedy(job.target, p) for p in PROMPTS]
    assert output.peak_memory_bytes is None or output.peak_memory_bytes > 50e6
