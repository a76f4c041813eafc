"""The backups: n-gram lookup against a naive search, and the choice between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import EXACT

from saguaro_core.fallback import FallbackChooser
from saguaro_core.ngrams import MAX_NGRAM, NgramIndex


def naive_proposal(tokens: list[int], count: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest n-gram at the end, by looking at every place."""
    for n in range(min(MAX_NGRAM, len(tokens)), 1, -1):
        places = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[-n:]]
        if places:
            text = list(tokens)
            for offset in range(count):
                text.append(text[places[-1] + offset])
            return text[len(tokens) :]
    return []


class TestNgrams:
    @EXACT
    @given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 9), st.data())
    def test_agree_with_a_naive_search_however_the_text_came(
        self, tokens: list[int], count: int, data: st.DataObject
    ) -> None:
        cut = data.draw(st.integers(0, len(tokens)))
        index = NgramIndex(tokens[:cut])
        index.extend(tokens[cut:])
        assert index.propose(count) == naive_proposal(tokens, count)
        assert index.token_ids == tokens

    def test_the_longest_match_counts_and_of_these_the_latest(self) -> None:
        # "2 3" was followed by 9 last, but "1 2 3" by 7.
        assert NgramIndex([1, 2, 3, 7, 0, 2, 3, 9, 1, 2, 3]).propose(1) == [7]
        assert NgramIndex([1, 2, 7, 1, 2, 8, 1, 2]).propose(3) == [8, 1, 2]

    def test_a_loop_keeps_looping_past_the_end(self) -> None:
        assert NgramIndex([5, 1, 2, 3, 1, 2, 3]).propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]
        assert NgramIndex([4, 4, 4]).propose(5) == [4, 4, 4, 4, 4]

    @pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 1], [1, 2, 3, 4]])
    def test_one_repeated_token_is_too_little(self, tokens: list[int]) -> None:
        assert NgramIndex(tokens).propose(4) == []

    def test_asking_changes_nothing(self) -> None:
        index = NgramIndex([1, 2, 3, 1, 2])
        assert index.propose(2) == index.propose(2) == [3, 1]
        assert index.propose(0) == []


def chooser_after(rounds: int, *, is_hit: bool, seconds: float, neural_seconds: float) -> FallbackChooser:
    chooser = FallbackChooser("auto")
    for _ in range(rounds):
        chooser.observe_fallback("neural", neural_seconds)
        chooser.observe_round(is_hit=is_hit, accepted=1, seconds=seconds)
    return chooser


class TestChoice:
    @pytest.mark.parametrize("policy", ["neural", "fast"])
    def test_a_fixed_policy_is_followed_whatever_was_seen(self, policy: str) -> None:
        chooser = FallbackChooser(policy)  # type: ignore[arg-type]
        for duration in (0.0, 100.0):
            chooser.observe_fallback("neural", duration)
            chooser.observe_round(is_hit=False, accepted=0, seconds=1.0)
            assert chooser.choose() == policy

    def test_auto_starts_neural_until_both_times_are_known(self) -> None:
        chooser = FallbackChooser("auto")
        assert chooser.choose() == "neural"
        chooser.observe_fallback("neural", 1000.0)
        assert chooser.choose() == "neural"
        chooser.observe_round(is_hit=False, accepted=0, seconds=0.001)
        assert chooser.choose() == "fast"

    def test_auto_takes_the_faster_by_the_speed_formula(self) -> None:
        for neural_seconds in (0.0, 0.1, 0.3, 0.6, 1.0, 3.0):
            for accepted_neural, accepted_fast in ((3, 0), (1, 0), (1, 1), (0, 2)):
                chooser = FallbackChooser("auto")
                for _ in range(40):
                    chooser.observe_fallback("neural", neural_seconds)
                    chooser.observe_round(is_hit=False, accepted=accepted_neural, seconds=1.0)
                    chooser.observe_round(is_hit=True, accepted=2, seconds=1.0)
                    chooser.observe_fallback("fast", 0.0)
                    chooser.observe_round(is_hit=False, accepted=accepted_fast, seconds=1.0)
                p = (4 * 0.5 + 40) / 124
                hit = (4 * 2.0 + 40 * 3) / 44
                neural = (4 * 1.8 + 40 * (accepted_neural + 1)) / 44
                fast = (4 * 1.2 + 40 * (accepted_fast + 1)) / 44
                speed_neural = (p * hit + (1 - p) * neural) / (1 + (1 - p) * neural_seconds)
                speed_fast = p * hit + (1 - p) * fast
                expected = "fast" if speed_fast > speed_neural else "neural"
                assert chooser.choose() == expected, (neural_seconds, accepted_neural, accepted_fast)

    def test_auto_prefers_neural_when_it_is_cheap_and_fast_when_it_is_dear(self) -> None:
        assert chooser_after(20, is_hit=False, seconds=1.0, neural_seconds=0.05).choose() == "neural"
        assert chooser_after(20, is_hit=False, seconds=1.0, neural_seconds=2.0).choose() == "fast"

    def test_auto_turns_fast_at_the_critical_batch_size_and_says_which_that_is(self) -> None:
        for neural_seconds in (0.05, 0.2, 0.4, 1.0):
            choosers = [FallbackChooser("auto", batch_size) for batch_size in range(1, 40)]
            for chooser in choosers:
                assert chooser.critical_batch_size() is None
                for _ in range(60):
                    chooser.observe_fallback("neural", neural_seconds)
                    chooser.observe_round(is_hit=False, accepted=2, seconds=1.0)
                    chooser.observe_fallback("fast", 0.0)
                    chooser.observe_round(is_hit=False, accepted=1, seconds=1.0)
                    for _ in range(8):
                        chooser.observe_round(is_hit=True, accepted=2, seconds=1.0)
            critical = choosers[0].critical_batch_size()
            assert {chooser.critical_batch_size() for chooser in choosers} == {critical}
            fast_from = [chooser.batch_size for chooser in choosers if chooser.choose() == "fast"]
            assert fast_from == ([] if critical is None else list(range(critical, 40)))
            assert (critical is None) == (neural_seconds == 0.05)

    def test_an_empty_lookup_counts_as_the_fast_backup(self) -> None:
        chooser = FallbackChooser("auto")
        before = chooser.tokens_neural.value
        chooser.observe_fallback("fast", 0.0)
        chooser.observe_round(is_hit=False, accepted=0, seconds=1.0)
        assert chooser.tokens_neural.value == before
        assert chooser.tokens_fast.weight == 5
        assert chooser.neural_seconds.weight < 1
