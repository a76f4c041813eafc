"""What can go wrong, as a caller sees it. Interfaces translate these at their own edge."""


class SaguaroError(Exception):
    """Base of every error that the engine raises on purpose; its text is meant for the user."""


class InvalidRequest(SaguaroError):
    """A setting or a prompt that cannot be used; nothing was started and nothing was changed."""


class ModelError(SaguaroError):
    """A model could not be found, fetched, read or paired."""


class DraftUnavailable(SaguaroError):
    """The draft process did not load, died, or did not answer in time."""


class EngineUnavailable(SaguaroError):
    """The engine process is not running or stopped answering."""


def describe(error: BaseException) -> str:
    """An error as a user reads it: our own speak for themselves, others are named by their type."""
    return str(error) if isinstance(error, SaguaroError) else f"{type(error).__name__}: {error}"
