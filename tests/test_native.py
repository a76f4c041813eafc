"""The compiled decoder: its products against numpy, whole forwards against transformers, and rows bit by bit."""

import subprocess
import sys
from pathlib import Path

import native_products
import numpy as np
import pytest
import torch
from native_products import FORMATS, INPUTS, make_matrix, multiply
from numpy.typing import NDArray
from random_models import CONFIGS, VOCABULARY, make_model, make_runner, tokens
from safetensors import safe_open
from transformers import PreTrainedModel

from saguaro_core.errors import ModelError
from saguaro_core.models.fetch import fetch_model
from saguaro_core.models.kv_cache import SLOT_BLOCK
from saguaro_core.models.native.blocks import BLOCKS_FILE, BlocksFile, NoQuantisedWeights
from saguaro_core.models.native.emitter import IS_WIDE
from saguaro_core.models.native.gguf_blocks import write_blocks
from saguaro_core.models.native.packing import Blocks, Matrix, pack, stack, unpack_rows
from saguaro_core.models.native.runner import NativeRunner
from saguaro_core.models.native.trial import try_native
from saguaro_core.models.runner import DivisibleRunner, ForwardBatch, trunk_batch


def dense(matrix: Matrix) -> NDArray[np.float64]:
    return (matrix.dense() if isinstance(matrix, Blocks) else matrix).astype(np.float64)


class TestProducts:
    @pytest.mark.parametrize(("kind", "four_bit"), FORMATS)
    def test_every_number_of_rows_gives_the_product_and_the_same_bits(self, kind: str, four_bit: bool) -> None:
        matrix = make_matrix(kind)
        x = np.random.default_rng(1).standard_normal((15, INPUTS)).astype(np.float32)
        alone = np.concatenate([multiply(matrix, row[None], four_bit=four_bit) for row in x])
        expected = x.astype(np.float64) @ dense(matrix).T
        assert np.abs(alone - expected).max() <= 1e-4 * np.abs(expected).max()
        for rows in range(2, 16):
            assert np.array_equal(multiply(matrix, x[:rows], four_bit=four_bit), alone[:rows]), rows

    @pytest.mark.slow
    def test_wider_and_narrower_registers_give_the_same_bits(self, tmp_path: Path) -> None:
        other, width = tmp_path / "other.npz", "narrow" if IS_WIDE else "wide"
        subprocess.run(
            [sys.executable, native_products.__file__, width, str(tmp_path), str(other)], check=True, timeout=300
        )
        assert list(tmp_path.rglob("*.nbc")), "the other width was not compiled"
        own = native_products.make_products()
        with np.load(other) as found:
            assert set(found) == set(own)
            for name, product in own.items():
                assert np.isfinite(product).all(), name
                assert np.array_equal(found[name], product), name

    @pytest.mark.slow
    def test_two_threads_give_the_bits_of_one(self) -> None:
        matrix = make_matrix("offset")
        x = np.random.default_rng(2).standard_normal((5, INPUTS)).astype(np.float32)
        assert np.array_equal(multiply(matrix, x, threads=2), multiply(matrix, x))

    @pytest.mark.parametrize(("kind", "four_bit"), [("half", False), ("int8", False), ("offset", False)])
    def test_rows_can_be_read_back(self, kind: str, four_bit: bool) -> None:
        matrix, outputs = make_matrix(kind), np.array([0, 31, 32, 71, 5])
        assert np.array_equal(unpack_rows(pack(matrix), outputs), dense(matrix)[outputs].astype(np.float32))

    def test_stacked_matrices_keep_their_values(self) -> None:
        mixed = [make_matrix("offset", 1), make_matrix("int8", 2)]
        whole = stack(mixed)
        assert isinstance(whole, Blocks)
        assert np.array_equal(dense(whole), np.concatenate([dense(part) for part in mixed]))

    def test_inputs_that_fill_no_block_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"40 inputs.*multiple of 32"):
            pack(np.zeros((8, 40), np.float16))


def make_large_enough(kind: str = "llama", /, **options: object) -> PreTrainedModel:
    """A random model whose sizes the compiled decoder takes."""
    sizes: dict[str, object] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    return make_model(CONFIGS[kind], **(sizes | options))


def native(model: PreTrainedModel) -> NativeRunner | None:
    return try_native(model, NoQuantisedWeights(), "auto", vocabulary_size=VOCABULARY, context_length=1024, threads=1)


@pytest.fixture(scope="module", params=list(CONFIGS))
def runner(request: pytest.FixtureRequest) -> NativeRunner:
    made = native(make_large_enough(request.param))
    assert made is not None
    return made


class TestForwards:
    def test_logits_are_those_of_the_torch_runner(self, runner: NativeRunner, request: pytest.FixtureRequest) -> None:
        kind = request.node.callspec.params["runner"]
        with torch.no_grad():
            model = make_large_enough(kind)
            for parameter in model.parameters():  # What float16 storage keeps of them.
                parameter.copy_(parameter.half().float())
        own = make_runner(model)
        ids = tokens(SLOT_BLOCK + 30)  # The cache grows on the way.
        for batch in (trunk_batch(ids[:40], 0, 3), trunk_batch(ids[40:], 40, 5), trunk_batch([7], len(ids), 1)):
            found, expected = runner.forward(batch), own.forward(batch)
            assert found is not None
            assert expected is not None
            assert found.shape == expected.shape
            assert torch.allclose(found, expected, atol=2e-3)

    def test_tokens_alone_and_together_have_the_same_bits(self, runner: NativeRunner) -> None:
        ids = tokens(24, seed=3)
        together = runner.forward(trunk_batch(ids, 0, len(ids)))
        assert together is not None
        for start in range(len(ids)):
            alone = runner.forward(trunk_batch([ids[start]], start, 1))
            assert alone is not None
            assert torch.equal(alone[0, 0], together[0, start]), start

    def test_branches_have_the_bits_of_the_trunk_wherever_they_lie(self, runner: NativeRunner) -> None:
        context, branch = tokens(10, seed=4), tokens(3, seed=5)
        trunk = runner.forward(trunk_batch(context + branch, 0, 3))
        assert trunk is not None
        runner.forward(trunk_batch(context, 0, 0))
        for depth, token in enumerate(branch):  # The middle one of three branches; the others hold other tokens.
            first = 10 + 3 * depth
            visible = torch.zeros(1, 3, first + 3, dtype=torch.bool)
            visible[..., :10] = True
            for lane in range(3):
                visible[0, lane, 10 + lane :: 3] = True
            batch = ForwardBatch(
                token_ids=torch.tensor([[1, token, 2]]),
                positions=torch.full((1, 3), 10 + depth),
                slots=torch.arange(first, first + 3).unsqueeze(0),
                used=first + 3,
                visible=visible,
                num_logits=3,
                first=first,
            )
            logits = runner.forward(batch)
            assert logits is not None
            assert torch.equal(logits[0, 1], trunk[0, depth])
        runner.move([11, 14, 17], 10)
        after = runner.forward(trunk_batch([5], 13, 1))
        runner.forward(trunk_batch(context + branch, 0, 0))
        expected = runner.forward(trunk_batch([5], 13, 1))
        assert after is not None
        assert expected is not None
        assert torch.equal(after, expected)

    def test_ragged_rows_have_the_bits_of_their_solo_runs(self, runner: NativeRunner) -> None:
        prompts, ends = [tokens(9, 6), tokens(5, 7)], [tokens(2, 8), tokens(4, 9)]
        solo = []
        for prompt, end in zip(prompts, ends, strict=True):
            runner.forward(trunk_batch(prompt, 0, 0))
            solo.append(runner.forward(trunk_batch(end, len(prompt), len(end))))
        for row, prompt in enumerate(prompts):
            filled = trunk_batch(prompt, 0, 0)
            runner.forward(
                ForwardBatch(
                    filled.token_ids, filled.positions, filled.slots, filled.used, filled.visible, 0, 0, (row,)
                )
            )
        used = 12
        slots = torch.tensor([[used - 1, used - 1, 9, 10], [5, 6, 7, 8]])
        visible = torch.arange(used) <= slots.unsqueeze(-1)
        both = ForwardBatch(
            torch.tensor([[0, 0, *ends[0]], ends[1]]), slots, slots, used, visible, 4, rows=(0, 1), lengths=(2, 4)
        )
        logits = runner.forward(both)
        assert logits is not None
        assert solo[0] is not None
        assert solo[1] is not None
        assert torch.equal(logits[0, 2:], solo[0][0])
        assert torch.equal(logits[1], solo[1][0])
        runner.keep_rows(1)

    def test_a_forward_in_parts_has_the_same_bits_and_one_left_undone_leaves_the_cache_right(
        self, runner: NativeRunner
    ) -> None:
        assert isinstance(runner, DivisibleRunner)
        context, batch = tokens(12, seed=6), trunk_batch(tokens(3, seed=7), 12, 3)
        runner.forward(trunk_batch(context, 0, 0))
        parts, count = runner.forward_in_parts(batch), 0
        while True:
            try:
                next(parts)
            except StopIteration as end:
                in_parts = end.value
                break
            count += 1
            # What another forward did to these slots before this one is over does not matter.
            undone = runner.forward_in_parts(trunk_batch(tokens(3, seed=8), 15, 3))
            next(undone)
            undone.close()
        assert count == runner.num_parts - 1
        whole = runner.forward(batch)
        assert whole is not None
        assert torch.equal(in_parts, whole)

    def test_nan_weights_are_reported(self) -> None:
        made = native(make_large_enough())
        assert made is not None
        made.weights.norms[-1, 0] = np.nan
        with pytest.raises(ModelError, match="NaN"):
            made.forward(trunk_batch([1, 2], 0, 1))


class TestTrial:
    @pytest.mark.parametrize(
        "options",
        [
            {"hidden_act": "gelu"},
            {"hidden_size": 72},
            {"head_dim": 24},
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        ],
    )
    def test_another_function_or_size_stays_in_torch(self, options: dict[str, object]) -> None:
        assert native(make_large_enough(**options)) is None

    @pytest.mark.parametrize("options", [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
    def test_biases_and_tied_heads_are_taken(self, options: dict[str, object]) -> None:
        model = make_large_enough(**options)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
        assert native(model) is not None


class TestBlocks:
    def test_the_default_target_keeps_the_numbers_of_its_file(self) -> None:
        folder = fetch_model()
        blocks = BlocksFile(folder / BLOCKS_FILE)
        with safe_open(folder / "model.safetensors", framework="np") as file:
            for name in ("model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.weight"):
                found = blocks.find(name)
                assert found is not None
                assert np.array_equal(found.dense().astype(np.float16), file.get_tensor(name))
        assert blocks.find("model.norm.weight") is None

    def test_only_matrices_with_the_same_numbers_are_kept(self, tmp_path: Path) -> None:
        """A GGUF file of three matrices: one as expected, one with rotary pairs in its own order, one that differs."""
        from gguf import GGMLQuantizationType, GGUFWriter, quantize

        path, size = tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0
        random = np.random.default_rng(0)
        plain, rotary, other = (random.standard_normal((64, 32)).astype(np.float32) for _ in range(3))
        writer = GGUFWriter(path, "llama")
        for name, values in (("ffn_up", plain), ("attn_q", rotary), ("ffn_down", other)):
            writer.add_tensor(f"blk.0.{name}.weight", quantize(values, size), raw_dtype=size)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

        def rounded(values: NDArray[np.float32]) -> NDArray[np.float16]:
            from gguf import dequantize

            return np.asarray(dequantize(quantize(values, size), size)).astype(np.float16)

        apart = rounded(rotary).reshape(2, 16, 2, 32).swapaxes(1, 2).reshape(64, 32)
        dense_weights = {
            "model.layers.0.mlp.up_proj.weight": rounded(plain),
            "model.layers.0.self_attn.q_proj.weight": apart,
            "model.layers.0.mlp.down_proj.weight": rounded(plain),
        }
        write_blocks(path, dense_weights, tmp_path / BLOCKS_FILE)
        blocks = BlocksFile(tmp_path / BLOCKS_FILE)
        for name, expected in list(dense_weights.items())[:2]:
            found = blocks.find(name)
            assert found is not None
            assert np.array_equal(found.dense().astype(np.float16), expected)
        assert blocks.find("model.layers.0.mlp.down_proj.weight") is None
