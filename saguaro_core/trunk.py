"""The text that a model's cache holds: token i of a sequence lies in slot i.

It outlives requests: a new one starts from the prefix that its prompt shares with what the cache holds. The token ids
of the valid slots are the only record of them, changed after a forward has succeeded and never before, so that a run
that failed or was stopped leaves a true record. A key depends on the tokens up to its own only, so a slot is right for
every text that begins with the recorded ones, whether or not they were committed.
"""

from torch import Tensor

from saguaro_core.models.runner import Runner, trunk_batch


class Trunk:
    """The valid slots of one sequence over one runner; len() counts them."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.token_ids: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def keep(self, num_tokens: int) -> None:
        """Forget every slot from `num_tokens` on."""
        del self.token_ids[num_tokens:]

    def forget(self) -> None:
        """Forget everything: for whoever writes to the runner's cache by another way than this trunk."""
        self.token_ids.clear()

    def reuse(self, text: list[int]) -> int:
        """Keep the slots that begin `text`, of which the last token is left to be read; how many there are."""
        shared = 0
        for held, wanted in zip(self.token_ids, text[:-1], strict=False):
            if held != wanted:
                break
            shared += 1
        self.keep(shared)
        return shared

    def forward(self, token_ids: list[int], num_logits: int) -> Tensor | None:
        """Append tokens: logits [num_logits, V] of the last of them, None for none."""
        logits = self.runner.forward(trunk_batch(token_ids, len(self), num_logits))
        self.append(token_ids)
        return None if logits is None else logits[0]

    def append(self, token_ids: list[int]) -> None:
        """Record tokens that a forward has put into the slots that follow."""
        self.token_ids += token_ids

    def move(self, slots: list[int], token_ids: list[int]) -> None:
        """Append tokens whose keys and values lie in other slots already."""
        if slots:
            self.runner.move(slots, len(self))
            self.append(token_ids)
