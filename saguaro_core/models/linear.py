"""CPU modules for half-precision weights: prepacked linears, fp32-valued embeddings, fused norms.

On x86, fbgemm multiplies fp32 activations with fp16 weights packed once at load; a forward of a few rows then reads
half the bytes that float32 would. Where fbgemm is missing plain float32 linears serve.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm


def has_fbgemm() -> bool:
    """Whether prepacked fp16 linears run on this machine."""
    return "fbgemm" in torch.backends.quantized.supported_engines


class HalfLinear(nn.Module):
    """x @ W.T + bias with W packed as fp16 for fbgemm; x and the result are float32."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        bias = None if source.bias is None else source.bias.detach().float()
        self.packed = torch.ops.quantized.linear_prepack_fp16(source.weight.detach().float(), bias)
        self.num_bytes = 2 * source.weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        # The overload itself: finding it by the arguments costs more than some of these products.
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, self.packed)
        return product


class FloatLinear(nn.Module):
    """The same product with float32 weights: the fallback where fbgemm is missing."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(source.weight.detach().float(), requires_grad=False)
        self.bias = None if source.bias is None else nn.Parameter(source.bias.detach().float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class HalfEmbedding(nn.Module):
    """Looks rows up in a half-precision table and returns them as float32."""

    def __init__(self, source: nn.Embedding) -> None:
        super().__init__()
        # A copy: the original may be a view of the whole checkpoint, which it would keep mapped.
        self.weight = nn.Parameter(source.weight.detach().clone(), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return embedding(token_ids, self.weight).float()


class FusedRMSNorm(nn.Module):
    """weight * x / rms(x), one kernel instead of six."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
        self.shape = tuple(weight.shape)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.shape, self.weight, self.eps)


def _fused_norm(module: nn.Module) -> FusedRMSNorm | None:
    """The fused form of a norm that computes weight * x / rms(x), seen by trying (Gemma's 1 + weight does not)."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    fused = FusedRMSNorm(weight, eps)
    x = torch.linspace(-1.0, 1.0, weight.numel()).unsqueeze(0)
    return fused if torch.allclose(module(x).float(), fused(x), rtol=1e-3, atol=1e-4) else None


def _replacement(module: nn.Module) -> nn.Module | None:
    if isinstance(module, nn.Linear):
        return HalfLinear(module) if has_fbgemm() else FloatLinear(module)
    if type(module) is nn.Embedding:
        return HalfEmbedding(module)
    return _fused_norm(module)


@torch.no_grad()
def prepare_for_cpu(model: nn.Module) -> None:
    """Swap a model's linears, embeddings and plain RMS norms for the modules above, in place.

    Everything else becomes float32, so activations are float32 throughout.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            new = _replacement(child)
            if new is not None:
                setattr(parent, name, new)
    for module in model.modules():
        if not isinstance(module, HalfEmbedding):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().float(), requires_grad=False))
