"""The speculation cache of one round: prepared outcomes, and the speculation that follows each."""

from dataclasses import dataclass, field

from saguaro_core.verification import Outcome


@dataclass(slots=True)
class SpeculationCache:
    """Branches of one build: branch b answers outcome `outcomes[b]` and has `lengths[b]` tokens ready."""

    outcomes: list[Outcome] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def lookup(self, outcome: Outcome, least: int = 1) -> int | None:
        """Branch prepared for this outcome with at least `least` tokens ready; None is a miss."""
        if outcome not in self.outcomes:
            return None
        branch = self.outcomes.index(outcome)
        return branch if self.lengths[branch] >= least else None

    def prepared(self) -> list[tuple[int, list[int]]]:
        """Prepared bonus tokens for each acceptance length, as (k, token ids)."""
        by_length: dict[int, list[int]] = {}
        for outcome in self.outcomes:
            by_length.setdefault(outcome.accepted, []).append(outcome.bonus_token_id)
        return sorted(by_length.items())
