"""The runner and its slotted cache against transformers' own forward: rollback, branches, growth, CPU modules."""

from collections.abc import Callable

import pytest
import torch
from random_models import CONFIGS, VOCABULARY, make_model, make_runner, tokens
from torch import Tensor, nn
from transformers import DynamicCache

from saguaro_core.decoding.target import TargetSession
from saguaro_core.errors import ModelError
from saguaro_core.models.attention import fold_mask, slotted_attention
from saguaro_core.models.kv_cache import SLOT_BLOCK, SlottedCache
from saguaro_core.models.runner import ForwardBatch, ModelRunner, trunk_batch


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: pytest.FixtureRequest) -> tuple[ModelRunner, Callable[[list[int]], Tensor]]:
    """A runner, and transformers' own forward of the same weights: sdpa, a fresh DynamicCache, all logits [n, V]."""
    kind = CONFIGS[request.param]
    own = make_model(kind)
    own.set_attn_implementation("sdpa")

    def forward(ids: list[int]) -> Tensor:
        with torch.inference_mode():
            out = own(input_ids=torch.tensor([ids]), past_key_values=DynamicCache(config=own.config), use_cache=True)
        logits: Tensor = out.logits[0]
        return logits

    return make_runner(make_model(kind)), forward


Pair = tuple[ModelRunner, Callable[[list[int]], Tensor]]


class TestAgainstTransformers:
    def test_one_forward_of_a_whole_prompt(self, pair: Pair) -> None:
        runner, own = pair
        ids = tokens(40)
        logits = runner.forward(trunk_batch(ids, 0, 40))
        assert logits is not None
        assert logits.shape == (1, 40, VOCABULARY)
        assert logits.dtype == torch.float32
        assert torch.allclose(logits[0], own(ids), atol=1e-4)

    @pytest.mark.parametrize("chunk", [1, 3, 7, 64])
    def test_prefill_in_chunks_gives_the_same(self, pair: Pair, chunk: int) -> None:
        runner, own = pair
        ids = tokens(23, seed=chunk)
        session = TargetSession(runner)
        shares = list(session.prefill(ids, chunk))
        assert shares[-1] == 1.0
        assert shares == sorted(shares)
        assert session.num_cached == 22
        assert torch.allclose(session.verify(ids, [])[0], own(ids)[-1], atol=1e-4)

    @pytest.mark.parametrize("lookahead", [1, 8])
    @pytest.mark.parametrize("prompt_length", [1, 12])
    def test_a_reject_at_the_first_position(self, pair: Pair, lookahead: int, prompt_length: int) -> None:
        self.check_rounds(pair, prompt_length, [(lookahead, 0)] * 3)

    @pytest.mark.parametrize("lookahead", [1, 8])
    def test_all_accepted(self, pair: Pair, lookahead: int) -> None:
        self.check_rounds(pair, 1, [(lookahead, lookahead)] * 4)

    def test_rejections_in_fifty_rounds(self, pair: Pair) -> None:
        self.check_rounds(pair, 1, [(8, number % 9) for number in range(50)])

    def check_rounds(self, pair: Pair, prompt_length: int, rounds: list[tuple[int, int]]) -> None:
        """After each round of K drafted and k accepted tokens the logits are those of a fresh prefill."""
        runner, own = pair
        context, session = tokens(prompt_length, seed=5), TargetSession(runner)
        list(session.prefill(context, 4))
        for number, (lookahead, accepted) in enumerate(rounds):
            drafted = tokens(lookahead, seed=100 + number)
            logits = session.verify(context, drafted)
            expected = own(context + drafted)[len(context) - 1 :]
            assert float((logits - expected).abs().max()) < 1e-4, number
            context = [*context, *drafted[:accepted], int(logits[accepted].argmax())]
            session.keep(len(context) - 1)
            assert session.num_cached == len(context) - 1

    def test_growth_over_block_boundaries_keeps_what_was_there(self, pair: Pair) -> None:
        runner, own = pair
        ids = tokens(SLOT_BLOCK * 2 + 30)
        session = TargetSession(runner)
        for end in (SLOT_BLOCK - 1, SLOT_BLOCK, SLOT_BLOCK + 1, 2 * SLOT_BLOCK, len(ids)):
            logits = session.verify(ids[:end], [])
            assert torch.allclose(logits[0], own(ids[:end])[-1], atol=1e-4)
        assert runner.cache.num_slots % SLOT_BLOCK == 0
        assert runner.cache.num_slots >= len(ids)

    def test_a_second_sequence_sees_nothing_of_the_first(self, pair: Pair) -> None:
        runner, own = pair
        for seed in (1, 2):
            ids = tokens(30 // seed, seed=seed)
            session = TargetSession(runner)
            list(session.prefill(ids, 5))
            assert torch.allclose(session.verify(ids, [])[0], own(ids)[-1], atol=1e-4)


class TestBranches:
    TRUNK = tokens(10, seed=8)
    # (parent: trunk tokens that the branch sees, its own tokens)
    BRANCHES = ((10, tokens(3, 20)), (8, tokens(3, 21)), (10, tokens(3, 22)), (1, tokens(3, 23)))

    def batch(self, depth: int) -> ForwardBatch:
        """One pass that advances every branch by one token."""
        count, trunk = len(self.BRANCHES), len(self.TRUNK)
        used = trunk + (depth + 1) * count
        visible = torch.zeros(1, count, used, dtype=torch.bool)
        for branch, (parent, _) in enumerate(self.BRANCHES):
            visible[0, branch, :parent] = True
            visible[0, branch, trunk + branch :: count] = True
        positions = torch.tensor([[parent + depth for parent, _ in self.BRANCHES]])
        slots = torch.arange(used - count, used).unsqueeze(0)
        ids = torch.tensor([[own[depth] for _, own in self.BRANCHES]])
        return ForwardBatch(ids, positions, slots, used, visible, count, first=used - count)

    def test_branches_in_one_pass_equal_each_branch_alone(self, pair: Pair) -> None:
        runner, own = pair
        runner.forward(trunk_batch(self.TRUNK, 0, 0))
        for depth in range(3):
            logits = runner.forward(self.batch(depth))
            assert logits is not None
            for branch, (parent, branch_tokens) in enumerate(self.BRANCHES):
                alone = own(self.TRUNK[:parent] + branch_tokens[: depth + 1])[-1]
                assert float((logits[0, branch] - alone).abs().max()) < 1e-4, (depth, branch)

    @pytest.mark.parametrize("branch", range(4))
    def test_a_branch_moved_into_the_trunk_continues_it(self, pair: Pair, branch: int) -> None:
        runner, own = pair
        runner.forward(trunk_batch(self.TRUNK, 0, 0))
        for depth in range(3):
            runner.forward(self.batch(depth))
        parent, branch_tokens = self.BRANCHES[branch]
        runner.move([len(self.TRUNK) + depth * len(self.BRANCHES) + branch for depth in range(3)], parent)
        context = [*self.TRUNK[:parent], *branch_tokens]
        logits = runner.forward(trunk_batch([7], len(context), 1))
        assert logits is not None
        assert float((logits[0, 0] - own([*context, 7])[-1]).abs().max()) < 1e-4

    def test_slots_in_any_order_serve_as_well_as_consecutive_ones(self, pair: Pair) -> None:
        runner, own = pair
        ids = tokens(6, seed=3)
        slots = torch.tensor([[5, 2, 9, 0, 7, 4]])
        visible = torch.zeros(1, 6, 10, dtype=torch.bool)
        for row in range(6):
            visible[0, row, slots[0, : row + 1]] = True
        batch = ForwardBatch(torch.tensor([ids]), torch.arange(6).unsqueeze(0), slots, 10, visible, 6)
        logits = runner.forward(batch)
        assert logits is not None
        assert torch.allclose(logits[0], own(ids), atol=1e-4)


class TestCache:
    def test_moves_may_overlap_their_source(self) -> None:
        cache = SlottedCache(1)
        layer = cache.slotted[0]
        layer.lazy_initialization(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
        assert layer.keys is not None
        layer.keys[0, 0, :, 0] = torch.arange(SLOT_BLOCK).float()
        cache.move(torch.tensor([4, 6, 8]), 5)
        assert layer.keys[0, 0, 3:10, 0].tolist() == [3, 4, 4, 6, 8, 8, 9]

    def test_reserving_less_than_is_there_changes_nothing(self) -> None:
        cache = SlottedCache(1)
        cache.reserve(SLOT_BLOCK)
        assert cache.num_slots == SLOT_BLOCK
        cache.reserve(SLOT_BLOCK + 1)
        assert cache.num_slots == 2 * SLOT_BLOCK
        cache.reserve(10 * SLOT_BLOCK - 5)
        assert cache.num_slots == 10 * SLOT_BLOCK

    def test_a_move_before_anything_was_written_is_harmless(self) -> None:
        SlottedCache(2).move(torch.tensor([3]), 0)

    def test_masks_repeat_for_the_query_heads_that_share_keys(self) -> None:
        visible = torch.tensor([[[True, False], [True, True]]])
        mask = fold_mask(visible, 3, torch.float32)
        assert mask.shape == (1, 1, 6, 2)
        assert mask[0, 0].tolist() == [[0, -torch.inf], [0, 0]] * 3

    @pytest.mark.parametrize("feature", ["softcap", "s_aux"])
    def test_attention_that_would_be_computed_wrongly_is_refused(self, feature: str) -> None:
        states = torch.zeros(1, 2, 1, 4)
        with pytest.raises(ModelError, match=f"attention uses {feature}"):
            slotted_attention(nn.Module(), states, states, states, None, **{feature: 30.0})


class TestRunner:
    def test_padded_vocabulary_entries_are_cut(self) -> None:
        model = make_model(vocab_size=VOCABULARY + 3)
        runner = make_runner(model)
        logits = runner.forward(trunk_batch([1, 2, 3], 0, 2))
        assert logits is not None
        assert logits.shape == (1, 2, VOCABULARY)

    def test_no_logits_are_made_when_none_are_asked_for(self) -> None:
        assert make_runner(make_model()).forward(trunk_batch([1, 2, 3], 0, 0)) is None

    def test_nan_weights_are_an_error_with_a_reason(self) -> None:
        model = make_model()
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)
        with pytest.raises(ModelError, match="NaN logits: its weights or its number format"):
            make_runner(model).forward(trunk_batch([1], 0, 1))
