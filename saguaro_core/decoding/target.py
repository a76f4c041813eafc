"""The target in one run: its cache of the answer so far, and the rule that turns its logits into an outcome."""

from collections.abc import Iterator

import torch
from torch import Tensor

from saguaro_core.config import SamplingParams, VerificationRule
from saguaro_core.decoding.sources import Proposal
from saguaro_core.models.runner import ForwardBatch, Runner, trunk_batch
from saguaro_core.sampling import GumbelNoise, Processing, Stream, process_logits, uniforms
from saguaro_core.scores import likeliest
from saguaro_core.trunk import Trunk
from saguaro_core.verification import Outcome, verify_coupled, verify_rejection


class TargetSession:
    """One sequence in the target's cache: token i of the context lies in slot i.

    It serves one request after another; each starts from the prefix that its prompt shares with what is held.
    `num_reused` counts the prompt tokens that the latest prefill found there.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.trunk = Trunk(runner)
        self.num_reused: int | None = None

    @property
    def num_cached(self) -> int:
        """How many slots are valid. What a verification wrote beyond the accepted tokens is not, once kept from."""
        return len(self.trunk)

    def forget(self) -> None:
        """Start the next request from an empty cache."""
        self.trunk.forget()

    def prefill(self, prompt: list[int], chunk: int) -> Iterator[float]:
        """Read all tokens but the last, which the first round verifies from; yields the share done after each chunk."""
        last = len(prompt) - 1
        self.num_reused = self.trunk.reuse(prompt)
        while len(self.trunk) < last:
            self.trunk.forward(prompt[len(self.trunk) : min(len(self.trunk) + chunk, last)], 0)
            yield len(self.trunk) / last

    def verify(self, context: list[int], drafted: list[int]) -> Tensor:
        """One forward over the last committed token and the drafted ones: logits [1 + K, V]."""
        logits = self.runner.forward(self.verification(context, drafted))
        assert logits is not None
        self.verified(context, drafted)
        return logits[0]

    def verification(self, context: list[int], drafted: list[int]) -> ForwardBatch:
        """The forward that `verify` makes, for whoever makes it together with others."""
        return trunk_batch(context[self.num_cached :] + drafted, self.num_cached, 1 + len(drafted))

    def verified(self, context: list[int], drafted: list[int]) -> None:
        """That forward was made: its tokens are in the cache."""
        self.trunk.append(context[self.num_cached :] + drafted)

    def keep(self, num_tokens: int) -> None:
        """Forget every slot from `num_tokens` on."""
        self.trunk.keep(num_tokens)


class Verifier:
    """Decides outcomes for one request; every random number is keyed by the request's seed and the position."""

    def __init__(
        self, sampling: SamplingParams, rule: VerificationRule, vocabulary_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.processing = Processing.of(sampling)
        self.seed = sampling.seed
        self._noise: GumbelNoise | None = None
        self._is_rejection = rule == "rejection" and not self.processing.is_greedy
        if rule == "shared_noise" and not self.processing.is_greedy:
            self._noise = GumbelNoise(sampling.seed, vocabulary_size, device)

    def decide(self, logits: Tensor, proposal: Proposal, position: int) -> Outcome:
        """The outcome under logits [1 + K, V], whose first row predicts absolute position `position`."""
        drafted = proposal.token_ids
        scores = process_logits(logits, self.processing)
        if not self._is_rejection:
            positions = list(range(position, position + len(logits)))
            noise = None if self._noise is None else self._noise.rows(positions)
            return verify_coupled(scores, noise, drafted)
        p = scores.softmax(-1)
        q = proposal.distributions
        dense = None if q is None else q.over_vocabulary(p.shape[-1], p.device)
        accept = _uniforms_at(self.seed, Stream.ACCEPT, position, len(drafted))
        bonus = _uniforms_at(self.seed, Stream.TARGET, position, len(drafted) + 1)
        return verify_rejection(p, dense, drafted, accept, bonus)

    def shown(
        self, logits: Tensor, token_ids: list[int], count: int
    ) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """For each row of logits [m, V] p of its token and the `count` likeliest ids with theirs: at the run's
        temperature (1 for a greedy run), before top-k and top-p. This is what is shown, not what is drawn from.
        """
        temperature = 1.0 if self.processing.is_greedy else self.processing.temperature
        return likeliest(logits, token_ids, count, temperature)


def _uniforms_at(seed: int, stream: Stream, first: int, count: int) -> list[float]:
    return [float(uniforms(seed, stream, position, 1)[0]) for position in range(first, first + count)]
