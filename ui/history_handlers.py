"""What the History page does."""

from typing import Any

from saguaro_core.config import MODES
from saguaro_core.errors import SaguaroError
from storage import STORED_STATUSES
from ui.handlers import Handlers, Value
from ui.run_log import StoredRunLog


class HistoryHandlers:
    """The list of stored comparisons over the log; `handlers` numbers the panels' values."""

    def __init__(self, handlers: Handlers, log: StoredRunLog) -> None:
        self.handlers = handlers
        self.log = log

    def rows(self, text: str, mode: str, status: str, before: Any = None) -> tuple[Value, Value]:
        """The list and the notice. A log that cannot be read is said, and shows as an empty list."""
        chosen = next((m for m in MODES if m == mode), None)
        stored = next((s for s in STORED_STATUSES if s == status), None)
        start = before if isinstance(before, int) else None
        try:
            page = self.log.history(text or "", chosen, stored, start)
        except SaguaroError as error:
            return {"rows": [], "at": self.handlers.number()}, self.handlers.notice(str(error))
        return {**page, "at": self.handlers.number()}, self.handlers.notice(self.log.problem or "", "info")

    def erase(self, comparison_id: str, text: str, mode: str, status: str) -> tuple[Value, Value]:
        """Delete a comparison that is not running, then list again."""
        service = self.handlers.service
        if service.is_active(comparison_id):
            listing, _ = self.rows(text, mode, status)
            return listing, self.handlers.notice("This comparison is still running: stop it first, then delete it.")
        is_done = self.log.delete(comparison_id)
        service.forget(comparison_id)
        listing, notice = self.rows(text, mode, status)
        return listing, notice if is_done else self.handlers.notice(self.log.problem or "It is not deleted yet.")
