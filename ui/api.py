"""The one public endpoint, `/compare`: a message and settings in, a stream of cumulative lanes out."""

from collections.abc import Callable, Generator

import gradio as gr

from saguaro_core.errors import SaguaroError
from ui.comparisons import ComparisonService
from ui.settings import CompareSettings

Snapshots = Generator[dict, None, None]  # type: ignore[type-arg]


def compare_endpoint(service: ComparisonService) -> Callable[..., Snapshots]:
    """The endpoint over a service. A caller that goes away stops its comparison: nobody else knows of it."""

    def compare(message: str, settings: dict | None = None) -> Snapshots:  # type: ignore[type-arg]
        """Answer `message` in every lane. `settings` are flat names such as temperature, lookahead, modes, seed."""
        try:
            comparison_id = service.start(message, CompareSettings.from_flat(settings))
        except SaguaroError as error:
            raise gr.Error(str(error), print_exception=False) from error
        try:
            yield from service.follow(comparison_id)
        finally:
            service.stop(comparison_id)

    return compare
