"""The target in one run: its cache of the answer so far, and the rule that turns its logits into an outcome."""

from collections.abc import Iterator

import torch
from torch import Tensor

from saguaro_core.config import SamplingParams, VerificationRule
from saguaro_core.decoding.sources import Proposal
from saguaro_core.models.runner import ForwardBatch, Runner, trunk_batch
from saguaro_core.sampling import GumbelNoise, Processing, Stream, process_logits, uniforms
from saguaro_core.verification import Outcome, verify_coupled, verify_rejection


class TargetSession:
    """The trunk of one sequence in the target's cache: token i of the context lives in slot i.

    `num_cached` counts the valid slots; what a verification wrote beyond the accepted tokens is forgotten by lowering
    it.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.num_cached = 0

    def prefill(self, prompt: list[int], chunk: int) -> Iterator[float]:
        """Read all tokens but the last, which the first round verifies from; yields the share done after each chunk."""
        last = len(prompt) - 1
        while self.num_cached < last:
            end = min(self.num_cached + chunk, last)
            self.runner.forward(trunk_batch(prompt[self.num_cached : end], self.num_cached, 0))
            self.num_cached = end
            yield end / last

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
        self.num_cached = len(context) + len(drafted)

    def keep(self, num_tokens: int) -> None:
        """Forget every slot from `num_tokens` on."""
        self.num_cached = min(self.num_cached, num_tokens)


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

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """log p [m, V] at the run's temperature (1 for a greedy run), before top-k and top-p: what is shown, not
        drawn from.
        """
        temperature = 1.0 if self.processing.is_greedy else self.processing.temperature
        return (logits / temperature).log_softmax(-1)


def _uniforms_at(seed: int, stream: Stream, first: int, count: int) -> list[float]:
    return [float(uniforms(seed, stream, position, 1)[0]) for position in range(first, first + count)]
