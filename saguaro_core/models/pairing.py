"""Whether two models speak of the same tokens. The token maps are compared, never numbers from a config.

The order of padding at the end of an embedding matrix is no part of the map: padded vocabularies pair.
"""

from transformers import PreTrainedTokenizerBase

from saguaro_core.errors import ModelError


def check_pairing(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, *, target_name: str, draft_name: str
) -> None:
    """Raise ModelError naming the first id that means different strings, control tokens included."""
    of_target, of_draft = _strings_by_id(target), _strings_by_id(draft)
    for token_id in sorted(of_target.keys() | of_draft.keys()):
        target_text, draft_text = of_target.get(token_id), of_draft.get(token_id)
        if target_text != draft_text:
            raise ModelError(
                f"The target {target_name!r} and the draft {draft_name!r} do not pair: token id {token_id} is "
                f"{_show(target_text)} in the target and {_show(draft_text)} in the draft. Choose a draft with the "
                "target's own tokenizer."
            )


def _strings_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: text for text, token_id in tokenizer.get_vocab().items()}


def _show(text: str | None) -> str:
    return "missing" if text is None else repr(text)
