"""A draft with a trimmed head as transformers' assisted generation wants it: scores over the target's whole vocabulary.

Assisted generation compares token ids and refuses a head of another size, so the trimmed scores are scattered into a
row of -inf. That costs one fill and one copy per drafted token, which `scatter_milliseconds` measures.
"""

import time

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from saguaro_core.models.load import LoadedDraft

_TRIALS = 50


class ScatteredHead(nn.Module):
    """A trimmed head whose logits go over all `vocabulary_size` tokens: -inf where it has no row."""

    def __init__(self, head: nn.Module, token_ids: Tensor, vocabulary_size: int) -> None:
        super().__init__()
        self.head = head
        self.vocabulary_size = vocabulary_size
        self.register_buffer("token_ids", token_ids)

    def forward(self, hidden: Tensor) -> Tensor:  # [..., hidden] -> [..., vocabulary]
        return self.scatter(self.head(hidden))

    def scatter(self, logits: Tensor) -> Tensor:  # [..., head rows] -> [..., vocabulary]
        """Put each score at its token's id."""
        full = logits.new_full((*logits.shape[:-1], self.vocabulary_size), float("-inf"))
        token_ids: Tensor = self.get_buffer("token_ids")
        return full.index_copy_(-1, token_ids, logits)


def make_assistant(draft: LoadedDraft) -> PreTrainedModel:
    """The draft, able to assist: its head is replaced in place if it is trimmed."""
    if draft.token_ids is not None:
        size = draft.model.config.get_text_config(decoder=True).vocab_size
        draft.model.lm_head = ScatteredHead(draft.model.get_output_embeddings(), draft.token_ids, size)
    return draft.model


@torch.inference_mode()
def scatter_milliseconds(head: ScatteredHead, dtype: torch.dtype) -> float:
    """What the scattering of one token's scores costs, the mean of a few."""
    logits = torch.zeros(1, 1, int(head.get_buffer("token_ids").numel()), dtype=dtype)
    head.scatter(logits)
    start = time.perf_counter()
    for _ in range(_TRIALS):
        head.scatter(logits)
    return 1000 * (time.perf_counter() - start) / _TRIALS
