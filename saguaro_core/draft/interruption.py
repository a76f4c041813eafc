"""What becomes of a step of the cache's build when the verdict comes in the middle of its forward."""

from saguaro_core.draft.speculator import Speculator
from saguaro_core.models.steps import Job
from saguaro_core.verification import Outcome


def build_job(speculator: Speculator) -> Job[bool]:
    """The next step of a build, as a job that can be left between two parts of its forward."""
    return Job(speculator.runner, speculator.build_in_steps())


def settle(speculator: Speculator, unfinished: Job[bool], outcome: Outcome, lookahead: int) -> None:
    """Finish the step if it gives the branch that is now asked for a token, of at most `lookahead`, that it should wait
    for; else drop it.
    """
    branches, rows = speculator.branches, speculator.next_rows
    branch = branches.cache.lookup(outcome, least=0)
    if branch is not None and branch in rows and branches.cache.lengths[branch] < lookahead:
        done = unfinished.share_done
        is_wanted = speculator.lessons.is_worth_finishing(branches, branch, len(rows), done)
    else:  # Where tokens are drawn a cache must have been planted, whatever the times.
        is_wanted = speculator.proposer.draws_tokens and not branches.cache.outcomes
    if is_wanted:
        unfinished.go_on()
    else:
        unfinished.drop()
