"""What can go wrong with the log, as a caller sees it."""

from saguaro_core.errors import SaguaroError


class StorageError(SaguaroError):
    """The log could not be opened or read; its text is meant for the user."""


class SchemaRefused(StorageError):
    """The file is a newer version's log, or no log at all; it was left as it was."""


class NotStored(StorageError):
    """The log holds no comparison or run of that name."""
