"""Judges a difference between two answers that should be equal: a tie in the last bits, or a fault.

A forward over several rows may differ from one over a single row in its last bits. Two answers may therefore part where
the target's best two scores (shared noise included) are closer than a bound, and nowhere else. Where activations are
half-precision numbers too, as on GPUs, the last bits are coarse: float16 logits from 16 on are 1/64 apart.
"""

from dataclasses import dataclass

import torch

from saguaro_core.config import SamplingParams
from saguaro_core.decoding.target import TargetSession
from saguaro_core.models.build import TargetModel, build_target
from saguaro_core.models.catalogue import DEFAULT_TARGET
from saguaro_core.models.placement import DevicePlan
from saguaro_core.models.runner import Runner
from saguaro_core.sampling import GumbelNoise, Processing, process_logits

TIE_BELOW = 1e-4
HALF_TIE_BELOW = 0.15


def best_two_gap(runner: Runner, context: list[int], sampling: SamplingParams) -> float:
    """How far apart a target's best two scores for the next token are, by a fresh forward over the context."""
    session = TargetSession(runner)
    for _ in session.prefill(context, 256):
        pass
    scores = process_logits(session.verify(context, []), Processing.of(sampling))
    if not Processing.of(sampling).is_greedy:
        scores = scores + GumbelNoise(sampling.seed, runner.vocabulary_size, scores.device).row(len(context))
    best, second = torch.topk(scores[0], 2).values.tolist()
    return float(best - second)


def first_difference(first: tuple[int, ...], second: tuple[int, ...]) -> int | None:
    """Where two answers part; None if one of them only ends earlier."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)


@dataclass
class TieJudge:
    """Scores positions with a target in this process, loaded when the first difference asks for it."""

    name: str = DEFAULT_TARGET
    target: TargetModel | None = None
    device: str = "cpu"
    bound: float = TIE_BELOW

    def gap(self, context: list[int], sampling: SamplingParams) -> float:
        """How far apart the best two scores for the next token are."""
        if self.target is None:
            self.target = build_target(self.name, DevicePlan((self.device,)))
        return best_two_gap(self.target.runner, context, sampling)

    def is_tie(
        self, prompt: list[int], first: tuple[int, ...], second: tuple[int, ...], sampling: SamplingParams
    ) -> bool:
        """Whether two unequal answers part at a tie."""
        place = first_difference(first, second)
        return place is not None and self.gap([*prompt, *first[:place]], sampling) < self.bound
