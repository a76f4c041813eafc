"""Which finished runs are saved whole, and which runs lost rows."""

from storage.commands import Command, FinishRun, run_of

_REMEMBERED = 10_000


class SaveResults:
    """Bounded memory of outcomes. Not thread-safe: the recorder's lock guards it."""

    def __init__(self) -> None:
        self.loss: str | None = None
        self._lossy: dict[str, str] = {}
        self._saved: dict[str, bool] = {}

    def lose(self, command: Command, reason: str) -> None:
        """A command was lost: its run, if it has one, is incomplete from now on."""
        run_id = run_of(command)
        self.loss = reason
        if run_id is None:
            return
        self._lossy[run_id] = reason
        if isinstance(command, FinishRun):
            self.settle(run_id)

    def settle(self, run_id: str) -> None:
        """The run's last row is committed or lost: its outcome is known."""
        is_whole = self._lossy.pop(run_id, None) is None and self._saved.get(run_id, True)
        self._saved[run_id] = is_whole
        if is_whole:
            self.loss = None
        if len(self._saved) > _REMEMBERED:
            del self._saved[next(iter(self._saved))]

    def is_lossy(self, run_id: str | None) -> bool:
        return run_id in self._lossy

    def lossy_runs(self) -> frozenset[str]:
        return frozenset(self._lossy)

    def is_known(self, run_id: str) -> bool:
        return run_id in self._saved

    def is_saved(self, run_id: str) -> bool:
        return self._saved.get(run_id, False)
