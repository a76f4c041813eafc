"""What the benchmark's commands say while they work: progress and errors, on standard error only."""

import sys
from collections.abc import Callable

from saguaro_core.errors import SaguaroError
from saguaro_core.status import EngineStatus

INTERRUPTED = 130


def say(text: str, end: str = "\n") -> None:
    """Write to standard error at once."""
    sys.stderr.write(text + end)
    sys.stderr.flush()


def exit_status(work: Callable[[], None]) -> int:
    """Do the work: 0 when it is done, 1 when it failed with a reason, 130 when it was interrupted."""
    try:
        work()
    except KeyboardInterrupt:
        say("\ninterrupted")
        return INTERRUPTED
    except (SaguaroError, OSError) as error:
        say(f"\nerror: {error}")
        return 1
    return 0


class StatusLine:
    """Says each step of loading once."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, status: EngineStatus) -> None:
        if status.message != self._last and status.state in ("starting", "loading"):
            self._last = status.message
            say(status.message)
