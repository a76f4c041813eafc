"""Small real models for tests: random weights, a byte-level tokenizer, saved the way transformers saves them."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY_SIZE = len(CONTROL_TOKENS) + 256


def make_tokenizer(
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    control_tokens: tuple[str, ...] = CONTROL_TOKENS,
    eos_token: str | None = "<|im_end|>",
) -> PreTrainedTokenizerBase:
    """One token per byte after the control tokens; every text can be encoded."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*control_tokens, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control_tokens])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos_token)
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny_llama(
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    vocab_size: int = VOCABULARY_SIZE,
    hidden_size: int = 32,
    num_layers: int = 2,
    context_length: int = 256,
    eos_token_id: int | list[int] | None = 2,
    seed: int = 0,
) -> Path:
    """A random Llama of a few thousand weights; the same seed gives the same model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_length,
        eos_token_id=eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder
