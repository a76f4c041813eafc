"""A pair is judged by its token maps: padding is fine, a different meaning of one id is not."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import CONTROL_TOKENS, make_tokenizer

from saguaro_core.errors import ModelError
from saguaro_core.models.load import load_draft
from saguaro_core.models.pairing import check_pairing


def test_equal_maps_pair() -> None:
    check_pairing(make_tokenizer(), make_tokenizer(eos_token=None), target_name="t", draft_name="d")


@pytest.mark.parametrize(
    ("control_tokens", "message"),
    [
        (("<|endoftext|>", "<|im_end|>", "<|im_start|>"), "id 1 is '<|im_start|>' in the target and '<|im_end|>' in"),
        (("<|endoftext|>", "<|im_start|>", "<|eot|>"), "id 2 is '<|im_end|>' in the target and '<|eot|>' in the draft"),
        ((*CONTROL_TOKENS, "<|more|>"), "id 3 is '!' in the target and '<|more|>' in the draft"),
    ],
    ids=["swapped", "renamed", "shifted"],
)
def test_the_first_differing_id_is_named_with_both_strings(control_tokens: tuple[str, ...], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_pairing(
            make_tokenizer(), make_tokenizer(control_tokens=control_tokens), target_name="big", draft_name="small"
        )
    assert message in str(caught.value)
    assert "'big'" in str(caught.value)
    assert "'small'" in str(caught.value)


@pytest.mark.parametrize("extended", ["target", "draft"])
def test_a_token_that_only_one_side_has_is_named(extended: str) -> None:
    plain, longer = make_tokenizer(), make_tokenizer()
    longer.add_tokens(["<think>"])
    target, draft = (longer, plain) if extended == "target" else (plain, longer)
    other = "draft" if extended == "target" else "target"
    with pytest.raises(ModelError, match=f"token id 259 is .*missing in the {other}"):
        check_pairing(target, draft, target_name="t", draft_name="d")


def test_padded_vocabularies_pair_at_load(tiny_llama: Callable[..., Path]) -> None:
    target = tiny_llama("target", vocab_size=320)
    draft = load_draft(str(tiny_llama("draft", vocab_size=272, hidden_size=16)), target_name=str(target))
    assert draft.vocabulary_size == 259
    assert draft.token_ids is None


def test_a_mismatched_pair_is_refused_at_load(tiny_llama: Callable[..., Path]) -> None:
    other = make_tokenizer(control_tokens=("<|endoftext|>", "<s>", "<|im_end|>"))
    target, draft = tiny_llama("target"), tiny_llama("draft", tokenizer=other)
    with pytest.raises(ModelError, match="do not pair: token id 1 is"):
        load_draft(str(draft), target_name=str(target))
