"""Judges a difference between two answers that should be equal: a tie in the last bits, or a fault.

A forward over several rows may differ from one over a single row in its last bits. Two answers may therefore part where
the target's best two scores (shared noise included) are closer than a bound, and nowhere else.
"""

from dataclasses import dataclass

import torch

from saguaro_core.config import SamplingParams
from saguaro_core.decoding.target import TargetSession
from saguaro_core.models.build import TargetModel, build_target
from saguaro_core.models.catalogue import DEFAULT_TARGET
from saguaro_core.models.placement import DevicePlan
from saguaro_core.sampling import GumbelNoise, Processing, process_logits

TIE_BELOW = 1e-4


@dataclass
class TieJudge:
    """Scores positions with a target in this process, loaded when the first difference asks for it."""

    name: str = DEFAULT_TARGET
    target: TargetModel | None = None

    def gap(self, context: list[int], sampling: SamplingParams) -> float:
        """How far apart the best two scores for the next token are, by a fresh forward over the context."""
        if self.target is None:
            self.target = build_target(self.name, DevicePlan(("cpu",)))
        runner = self.target.runner
        session = TargetSession(runner)
        for _ in session.prefill(context, 256):
            pass
        scores = process_logits(session.verify(context, []), Processing.of(sampling))
        if not Processing.of(sampling).is_greedy:
            scores = scores + GumbelNoise(sampling.seed, runner.vocabulary_size).row(len(context))
        best, second = torch.topk(scores[0], 2).values.tolist()
        return float(best - second)

    def is_tie(
        self, prompt: list[int], first: tuple[int, ...], second: tuple[int, ...], sampling: SamplingParams
    ) -> bool:
        """Whether two unequal answers part at a tie."""
        place = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        return place is not None and self.gap([*prompt, *first[:place]], sampling) < TIE_BELOW
