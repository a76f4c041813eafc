"""The table of token pairs: what it proposes, when it falls silent, and that it stays within its bounds."""

from saguaro_core.fallback import FastBackup
from saguaro_core.pair_table import MAX_FOLLOWERS, MAX_PROMPTS, MIN_SURVIVAL, PairMemory, PairTable


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


def remembering(*answers: list[int]) -> PairMemory:
    """A memory of answers to other prompts."""
    memory = PairMemory()
    for text in answers:
        memory.table.learn(text[0], text[1:])
    return memory


class TestOrder:
    """n-grams of the request first, then pairs, then nothing."""

    def test_what_each_finds_keeps_its_name(self) -> None:
        memory = remembering([5, 6, 7], [5, 6, 7])
        assert FastBackup([1, 2, 3, 1, 2], memory).propose(2) == ("ngram", [3, 1])
        assert FastBackup([1, 2, 3, 5], memory).propose(2) == ("pair", [6, 7])
        assert FastBackup([1, 2, 3, 4], memory).propose(2) == ("none", [])
        assert FastBackup([], memory).propose(2) == ("none", [])

    def test_pairs_are_those_of_the_answer_and_not_of_the_prompt(self) -> None:
        backup = FastBackup([1, 2, 3, 2, 1, 8], PairMemory())
        backup.extend([3, 5, 3, 5, 6, 3])
        assert backup.propose(1) == ("pair", [5])
        backup.extend([1])
        assert backup.propose(1) == ("none", [])

    def test_alone_it_knows_its_own_answer_only(self) -> None:
        memory = remembering([8, 9], [8, 9])
        assert FastBackup([1, 8], memory).propose(1) == ("pair", [9])
        assert FastBackup([1, 8], memory, alone=True).propose(1) == ("none", [])


class TestMemory:
    """An answer is never guessed from an answer to the same prompt."""

    PROMPT, OTHER, ANSWER = ([1, 2], [3, 4], [8, 9, 8, 9, 8, 9, 8])

    def answer(self, memory: PairMemory, prompt: list[int]) -> FastBackup:
        backup = FastBackup(prompt, memory)
        backup.extend(self.ANSWER)
        return backup

    def test_the_next_lane_of_a_comparison_does_not_see_the_last_one(self) -> None:
        memory = PairMemory()
        self.answer(memory, self.PROMPT)
        self.answer(memory, self.PROMPT)
        assert len(memory.table) == 0
        assert FastBackup([*self.PROMPT[:1], 8], PairMemory()).propose(1) == ("none", [])

    def test_another_prompt_learns_from_one_of_its_answers(self) -> None:
        memory = PairMemory()
        for _ in range(3):
            self.answer(memory, self.PROMPT)
        assert FastBackup([*self.OTHER, 8], memory).propose(1) == ("pair", [9])
        assert memory.is_known(self.PROMPT)

    def test_a_prompt_that_comes_again_later_is_answered_without_it(self) -> None:
        memory, again = PairMemory(), [5, 8]
        self.answer(memory, again)
        self.answer(memory, self.OTHER)
        assert FastBackup(again, memory).propose(1) == ("none", [])
        assert FastBackup([6, 8], memory).propose(1) == ("pair", [9])

    def test_it_forgets_which_prompts_it_knew_in_order(self) -> None:
        memory = PairMemory()
        for token in range(MAX_PROMPTS + 3):
            memory.notes([token]).learn(1, [2])
        assert not memory.is_known([0])
        assert memory.is_known([MAX_PROMPTS])

    def test_prompts_of_one_batch_all_teach(self) -> None:
        memory = PairMemory()
        together = [FastBackup(prompt, memory) for prompt in (self.PROMPT, self.OTHER, [5, 6])]
        assert not any(memory.is_known(prompt) for prompt in (self.PROMPT, self.OTHER))
        for backup in together:
            backup.extend(self.ANSWER)
        assert FastBackup([7, 8], memory).propose(1) == ("pair", [9])
        assert all(memory.is_known(prompt) for prompt in (self.PROMPT, self.OTHER, [5, 6]))
