"""Several sequences in one forward: each row says what it says alone, whatever stands beside it."""

import pytest
import torch
from random_models import make_model, make_runner, tokens
from scripted import ScriptedRunner, hashed
from torch import Tensor

from saguaro_core.models.lean import make_lean
from saguaro_core.models.rows import RowRunner, forward_together, merge
from saguaro_core.models.runner import ForwardBatch, ModelRunner, trunk_batch

LENGTHS = (7, 40, 1, 23)


def runner_of(is_lean: bool) -> ModelRunner:
    model = make_model()
    runner = make_runner(model)
    assert not is_lean or make_lean(model) == 2
    return runner


def alone(history: list[int], num_logits: int) -> Tensor:
    logits = make_runner(make_model()).forward(trunk_batch(history, 0, num_logits))
    assert logits is not None
    return logits


def branch_batch(ids: list[int], trunk: int) -> ForwardBatch:
    """One pass of branches that all see the trunk and themselves only."""
    first, used = trunk, trunk + len(ids)
    visible = torch.cat([torch.ones(len(ids), trunk), torch.eye(len(ids))], dim=1).bool().unsqueeze(0)
    slots = torch.arange(first, used).unsqueeze(0)
    return ForwardBatch(torch.tensor([ids]), torch.full_like(slots, trunk), slots, used, visible, len(ids), first=first)


@pytest.mark.parametrize("is_lean", [False, True])
@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (1, 2, 3, 4), (3, 0, 7, 5)])
class TestTogether:
    def test_each_row_says_what_it_says_alone(self, is_lean: bool, rows: tuple[int, ...]) -> None:
        runner = runner_of(is_lean)
        histories = [tokens(length, seed=length) for length in LENGTHS]
        for history, row in zip(histories, rows, strict=True):
            if history[:-1]:
                RowRunner(runner, row).forward(trunk_batch(history[:-1], 0, 0))
        drafted = [tokens(count, seed=count) for count in (3, 0, 5, 1)]
        batches = [
            trunk_batch([history[-1], *more], len(history) - 1, 1 + len(more))
            for history, more in zip(histories, drafted, strict=True)
        ]
        together = forward_together(runner, batches, rows)
        for logits, history, more in zip(together, histories, drafted, strict=True):
            assert logits is not None
            torch.testing.assert_close(logits, alone(history + more, 1 + len(more)), atol=1e-4, rtol=1e-4)

    def test_branches_beside_trunks_and_moves_within_a_row(self, is_lean: bool, rows: tuple[int, ...]) -> None:
        runner, histories = runner_of(is_lean), [tokens(length, seed=length) for length in LENGTHS]
        views = [RowRunner(runner, row) for row in rows]
        for history, view in zip(histories, views, strict=True):
            view.forward(trunk_batch(history, 0, 0))
        bonus = [2, 3, 5]
        batches = [branch_batch(bonus, len(history)) for history in histories[:3]]
        batches.append(trunk_batch([9], len(histories[3]), 1))
        together = forward_together(runner, batches, rows)
        for logits, history in zip(together[:3], histories[:3], strict=True):
            expected = torch.cat([alone([*history, token], 1) for token in bonus], dim=1)
            assert logits is not None
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        length = len(histories[1])
        views[1].move([length + 2], length)
        for index, expected_ids in ((0, [*histories[0], 2]), (1, [*histories[1], 5]), (3, [*histories[3], 9])):
            logits = views[index].forward(trunk_batch([11], len(expected_ids), 1))
            assert logits is not None
            torch.testing.assert_close(logits, alone([*expected_ids, 11], 1), atol=1e-4, rtol=1e-4)

    def test_rows_survive_growth_and_others_going(self, is_lean: bool, rows: tuple[int, ...]) -> None:
        runner = runner_of(is_lean)
        history, other = tokens(30, seed=1), tokens(300, seed=2)
        RowRunner(runner, 0).forward(trunk_batch(history, 0, 0))
        RowRunner(runner, max(rows)).forward(trunk_batch(other, 0, 0))
        assert runner.cache.num_rows == max(rows) + 1
        runner.keep_rows(1)
        assert runner.cache.num_rows == 1
        logits = runner.forward(trunk_batch([4], 30, 1))
        assert logits is not None
        torch.testing.assert_close(logits, alone([*history, 4], 1), atol=1e-4, rtol=1e-4)


class TestMerge:
    def test_padding_is_alone_in_a_slot_that_no_token_takes_or_sees(self) -> None:
        merged = merge([trunk_batch([1, 2, 3], 4, 2), trunk_batch([5], 9, 1)], (2, 3))
        assert (merged.rows, merged.lengths, merged.num_logits, merged.used) == ((2, 3), (3, 1), 2, 11)
        assert merged.slots.tolist() == [[4, 5, 6], [10, 10, 9]]
        assert merged.visible is not None
        assert not merged.visible[0, :, -1].any()
        assert merged.visible[1, :, -1].tolist() == [True, True, False]
        assert merged.visible[1, 2, :10].all()

    def test_rows_of_one_length_need_none(self) -> None:
        merged = merge([trunk_batch([1], 4, 1), trunk_batch([5], 9, 1)], (0, 1))
        assert (merged.lengths, merged.used) == (None, 10)

    def test_a_single_batch_stays_as_it_is(self) -> None:
        batch = trunk_batch([1, 2], 4, 2)
        merged = merge([batch], (3,))
        assert (merged.rows, merged.first, merged.slots is batch.slots) == ((3,), 4, True)

    def test_a_row_that_wants_no_logits_gets_none(self) -> None:
        runner = ScriptedRunner(hashed(8, 1.0, salt=1), 8)
        none, some = forward_together(runner, [trunk_batch([1, 2], 0, 0), trunk_batch([5], 0, 1)], (0, 1))
        assert none is None
        assert some is not None
        assert some.shape == (1, 1, 8)
        assert forward_together(runner, [trunk_batch([1], 0, 0)] * 2, (0, 1)) == (None, None)
