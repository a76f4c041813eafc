"""The speculation cache of one round: prepared outcomes, and the speculation that follows each."""

from dataclasses import dataclass, field

from saguaro_core.verification import Outcome


@dataclass(slots=True)
class SpeculationCache:
    """Branches of one build, in the order of their rows: branch b answers outcome `outcomes[b]`.

    All branches grow by one token in each pass, so `depth` tokens are ready for each of them at any moment.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    depth: int = 0

    def lookup(self, outcome: Outcome) -> int | None:
        """Branch prepared for this outcome with at least one token ready; None is a miss."""
        if self.depth == 0 or outcome not in self.outcomes:
            return None
        return self.outcomes.index(outcome)

    def prepared(self) -> list[tuple[int, list[int]]]:
        """Prepared bonus tokens for each acceptance length, as (k, token ids)."""
        by_length: dict[int, list[int]] = {}
        for outcome in self.outcomes:
            by_length.setdefault(outcome.accepted, []).append(outcome.bonus_token_id)
        return sorted(by_length.items())
