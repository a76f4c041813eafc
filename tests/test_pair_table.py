"""The table of token pairs: what it proposes, when it falls silent, and that it stays within its bounds."""

import pytest

from saguaro_core.fallback import FastBackup
from saguaro_core.pair_table import MAX_FOLLOWERS, MIN_SURVIVAL, PairTable


def taught(*texts: list[int], **options: int) -> PairTable:
    table = PairTable(**options)
    for text in texts:
        table.learn(text[0], text[1:])
    return table


class TestProposals:
    def test_the_most_frequent_follower_again_and_again(self) -> None:
        table = taught(*[[1, 2, 3, 4]] * 5, [9, 2, 3, 5], [1, 7])
        assert table.propose(1, 3) == [2, 3, 4]
        assert table.propose(1, 1) == [2]
        assert table.propose(1, 0) == []

    def test_what_was_seen_once_only_is_no_sign(self) -> None:
        assert taught([1, 2, 3]).propose(1, 4) == []
        assert taught([1, 2, 3], [1, 2, 4]).propose(1, 4) == [2]

    def test_ends_when_too_many_guesses_have_added_up(self) -> None:
        # Each step is right 9 times in 10, counted as 9 / 11.
        texts = [list(range(20))] * 9 + [[token, 99] for token in range(20)]
        table, share = taught(*texts), 9 / 11
        count = next(n for n in range(20) if share ** (n + 1) < MIN_SURVIVAL)
        assert table.propose(0, 16) == list(range(1, count + 1))
        assert taught([1, 2], [1, 3], [1, 2], [1, 3], [1, 4], [1, 5], [1, 6]).propose(1, 2) == []

    def test_of_equals_the_one_seen_last(self) -> None:
        assert taught([1, 2], [1, 3], [1, 3], [1, 2]).propose(1, 1) == [2]
        assert taught([1, 2], [1, 2], [1, 3], [1, 3]).propose(1, 1) == [3]

    def test_a_loop_goes_on(self) -> None:
        assert taught([1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2]).propose(1, 5)[:4] == [2, 1, 2, 1]


class TestBounds:
    def test_the_token_seen_least_recently_goes_first(self) -> None:
        table = taught([1, 5, 5, 5], [2, 6], [2, 6], max_tokens=2)
        assert len(table) == 2
        table.learn(3, [4])
        assert len(table) == 2
        assert table.propose(2, 1) == [6]
        assert table.propose(5, 1) == []

    def test_a_token_keeps_its_most_frequent_followers(self) -> None:
        table = taught(*[[1, 2]] * 40, *[[1, 100 + token] for token in range(10 * MAX_FOLLOWERS)])
        # Forgotten followers still count against the ones that are kept: 40 of 121.
        assert MIN_SURVIVAL < 40 / 121
        assert table.propose(1, 1) == [2]
        assert taught(*[[1, 2]] * 40, *[[1, 100 + token] for token in range(20)]).propose(1, 1) == [2]


class TestOrder:
    """n-grams of the request first, then pairs, then nothing."""

    def test_what_each_finds_keeps_its_name(self) -> None:
        table = taught([5, 6, 7], [5, 6, 7])
        assert FastBackup([1, 2, 3, 1, 2], [table]).propose(2) == ("ngram", [3, 1])
        assert FastBackup([1, 2, 3, 5], [table]).propose(2) == ("pair", [6, 7])
        assert FastBackup([1, 2, 3, 4], [table]).propose(2) == ("none", [])
        assert FastBackup([], [table]).propose(2) == ("none", [])

    def test_it_learns_from_what_is_committed_and_not_from_the_prompt(self) -> None:
        table = PairTable()
        backup = FastBackup([1, 2, 1, 2, 1, 2, 8], [table])
        assert len(table) == 0
        backup.extend([3, 4])
        backup.extend([8, 3, 4])
        assert table.propose(8, 2) == [3, 4]
        assert table.propose(1, 1) == []

    @pytest.mark.parametrize("rule", ["own first", "shared first"])
    def test_only_the_first_table_is_looked_into_and_all_learn(self, rule: str) -> None:
        own, shared = PairTable(), taught([8, 9], [8, 9])
        tables = (own, shared) if rule == "own first" else (shared,)
        backup = FastBackup([1, 8], tables)
        assert backup.propose(1) == (("none", []) if rule == "own first" else ("pair", [9]))
        backup.extend([9])
        assert shared.propose(8, 1) == [9]
