"""How slow steps report what they do: a message, and the share done (0..1) where it is known."""

from collections.abc import Callable

Progress = Callable[[str, float | None], None]


def ignore_progress(message: str, share: float | None) -> None:
    """The default: nobody is watching."""
