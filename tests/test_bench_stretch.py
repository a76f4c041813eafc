"""The benchmark's fixture `stretch`: zero padding changes nothing, the perturbation is seeded, the cache is reused."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_llama
from transformers import AutoModelForCausalLM, PreTrainedModel

from saguaro_core.bench_stretch import FOLDER, Sizes, Stretching, stretched_target
from saguaro_core.bench_stretch_weights import perturb, write_stretched
from saguaro_core.errors import InvalidRequest, ModelError
from saguaro_core.models.build import build_target
from saguaro_core.models.load import load_draft
from saguaro_core.models.placement import DevicePlan
from saguaro_core.models.runner import trunk_batch

SIZES = Sizes(hidden_size=128, intermediate_size=160, num_key_value_heads=4)
IDS = list(range(7, 19))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base"), seed=3)


def recipe(base: Path, noise: float = 0.0, seed: int = 0) -> Stretching:
    return Stretching(base=str(base), sizes=SIZES, noise=noise, seed=seed)


def write(stretching: Stretching, folder: Path) -> Path:
    folder.mkdir()
    write_stretched(stretching, folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


@torch.inference_mode()
def logits(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([IDS])).logits
    return found


def test_padding_alone_changes_no_logit(base: Path, tmp_path: Path) -> None:
    original, larger = load(base), load(write(recipe(base), tmp_path / "wide"))
    assert (larger.config.num_attention_heads, larger.config.num_key_value_heads) == (8, 4)
    assert larger.num_parameters() > 4 * original.num_parameters()
    torch.testing.assert_close(logits(larger), logits(original), rtol=1e-4, atol=1e-5)


def test_it_loads_like_any_target_and_pairs_with_the_original(base: Path, tmp_path: Path) -> None:
    folder = write(recipe(base), tmp_path / "wide")
    models = [build_target(str(path), DevicePlan(("cpu",))) for path in (base, folder)]
    results = [model.runner.forward(trunk_batch(IDS, 0, len(IDS))) for model in models]
    assert results[0] is not None
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)
    draft = load_draft(str(base), target_name=str(folder))
    assert draft.vocabulary_size == models[1].runner.vocabulary_size


def test_noise_changes_the_function_by_its_size(base: Path, tmp_path: Path) -> None:
    exact = logits(load(base))
    errors = [
        float((logits(load(write(recipe(base, noise), tmp_path / str(noise)))) - exact).abs().mean())
        for noise in (0.01, 0.1)
    ]
    assert 0 < 5 * errors[0] < errors[1] < float(exact.abs().mean())


def test_the_perturbation_is_seeded_by_name_and_leaves_norms_alone(base: Path) -> None:
    matrix, norm = torch.randn(40, 50, generator=torch.Generator().manual_seed(1)), torch.ones(50)
    noisy = perturb("a.weight", matrix, recipe(base, 0.1))
    assert torch.equal(noisy, perturb("a.weight", matrix, recipe(base, 0.1)))
    assert not torch.equal(noisy, perturb("b.weight", matrix, recipe(base, 0.1)))
    assert not torch.equal(noisy, perturb("a.weight", matrix, recipe(base, 0.1, seed=1)))
    assert float((noisy - matrix).std() / matrix.std()) == pytest.approx(0.1, rel=0.1)
    assert torch.equal(perturb("norm.weight", norm, recipe(base, 0.1)), norm)


def test_the_fixture_is_made_once_and_again_for_another_recipe(base: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def ask(noise: float) -> tuple[Path, float]:
        folder = stretched_target(
            recipe(base, noise), cache_dir=tmp_path, on_progress=lambda message, share: said.append(message)
        )
        return folder, float(json.loads((folder / "manifest.json").read_text("utf-8"))["origin"]["noise"])

    assert ask(0.1) == ask(0.1) == (tmp_path / "models" / FOLDER, 0.1)
    assert len(said) == 1
    assert ask(0.2)[1] == 0.2
    assert len(said) == 2
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [FOLDER, f"{FOLDER}.lock"]


def test_sizes_that_cannot_hold_the_model_are_refused(base: Path, tmp_path: Path) -> None:
    small = Stretching(base=str(base), sizes=Sizes(hidden_size=16, intermediate_size=160, num_key_value_heads=5))
    with pytest.raises(InvalidRequest, match="hidden_size is 16"):
        write_stretched(small, tmp_path)
    with pytest.raises(InvalidRequest, match="stretch_noise is 3"):
        Stretching(noise=3.0)
    with pytest.raises(ModelError, match=r"head\.bias is a bias"):
        write_stretched(Stretching(base="smollm2-draft"), tmp_path)
