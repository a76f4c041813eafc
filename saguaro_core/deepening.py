"""Which branches of the speculation cache the next draft pass should make longer, and whether it is worth its time.

The next token of the branch for outcome v is worth P(v) * a_1 ... a_d * a tokens: the outcome must come, the d tokens
that the branch holds must be accepted, and the new one too. A pass over n rows costs a fixed part and a part for each
row, so the best n has the most worth per second. A pass that would keep the target waiting must be worth more than
that time; where the verdict can interrupt a pass, that is one of its parts at most.
"""

from collections.abc import Sequence


def best_rows(worths: Sequence[float], fixed: float, per_row: float) -> int:
    """How many rows, the worthiest first, have the greatest worth per time; `worths` fall. 0 for none.

    Worth falls and time rises evenly, so the ratio rises to one summit and the search can stop there.
    """
    worth, time = 0.0, fixed
    for n, extra in enumerate(worths):
        if n and extra * time <= worth * per_row:
            return n
        worth += extra
        time += per_row
    return len(worths)


def is_worth_its_time(worth: float, late: float, rate: float) -> bool:
    """Whether a pass may start that keeps the target waiting for `late` seconds: what it adds against that time."""
    return late <= 0.0 or worth > rate * late
