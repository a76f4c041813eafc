"""The log: every comparison, run, round and token in one SQLite file. Nothing here imports torch or a page library."""

from storage.database import default_database_path
from storage.errors import NotStored, SchemaRefused, StorageError
from storage.export import EXPORT_FORMATS, ExportFile, ExportFormat, export
from storage.log_thread import RecorderLimits
from storage.queries import LogReader
from storage.recorder import Recorder
from storage.records import (
    STORED_STATUSES,
    HistoryEntry,
    HistoryPage,
    RunDetail,
    RunSummary,
    StoredComparison,
    StoredRun,
    StoredStatus,
)
from storage.scope import Selection

__all__ = [
    "EXPORT_FORMATS",
    "STORED_STATUSES",
    "ExportFile",
    "ExportFormat",
    "HistoryEntry",
    "HistoryPage",
    "LogReader",
    "NotStored",
    "Recorder",
    "RecorderLimits",
    "RunDetail",
    "RunSummary",
    "SchemaRefused",
    "Selection",
    "StorageError",
    "StoredComparison",
    "StoredRun",
    "StoredStatus",
    "default_database_path",
    "export",
]
