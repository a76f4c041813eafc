"""A small draft in the trimmed format, with a plain float32 model beside it to compare with."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

Logits = Callable[[torch.Tensor], torch.Tensor]


def save_trimmed_draft(
    folder: Path, target: Path, *, token_ids: list[int], embedding: torch.Tensor | None = None, seed: int = 1
) -> tuple[Path, Logits]:
    """Write a one-layer draft for the target folder; returns it and the logits that it must give in float32."""
    torch.manual_seed(seed)
    if embedding is None:
        embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    config = LlamaConfig.from_pretrained(target, num_hidden_layers=1, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).eval()
    head = torch.nn.Linear(config.hidden_size, len(token_ids))
    state = {name: t for name, t in model.state_dict().items() if not name.startswith(("lm_head", "model.embed"))}
    state |= {"head.weight": head.weight.detach(), "head.bias": head.bias.detach()}
    stored: dict[str, torch.Tensor] = {"head.token_ids": torch.tensor(token_ids, dtype=torch.int32)}
    exact = {}
    for name, tensor in state.items():
        packed, exact[name] = _quantise(tensor)
        stored[name] = packed[0]
        if len(packed) > 1:
            stored[f"{name}.scale"] = packed[1]
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    data = config.to_dict() | {"draft_head_size": len(token_ids)}
    (folder / "config.json").write_text(json.dumps(data))

    head_exact = (exact.pop("head.weight"), exact.pop("head.bias"))
    model.load_state_dict(exact | {"model.embed_tokens.weight": embedding.float()}, strict=False)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        hidden = model.model(input_ids=ids).last_hidden_state
        return torch.nn.functional.linear(hidden, *head_exact)

    return folder, logits


def _quantise(tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """What is stored, and the float32 values that it stands for."""
    if tensor.dim() == 1:
        half = tensor.half()
        return (half,), half.float()
    scale = (tensor.abs().amax(1) / 127).half()
    whole = (tensor / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return (whole, scale), whole.float() * scale.float()[:, None]
