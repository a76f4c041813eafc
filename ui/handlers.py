"""What the Compare page does: plain functions over plain data. Errors become a line on the page, never a trace."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from saguaro_core.errors import SaguaroError
from ui.comparisons import ComparisonService
from ui.settings import CompareSettings

_WHOLE_NUMBERS = ("seed", "max_new_tokens", "top_k")
_OPTIONAL_NUMBERS = ("acceptance", "power_law_r")
Value = dict[str, Any]
BUSY = "An answer is still running: stop it (Esc) or wait for its end, then send again. Nothing was started."


class Handlers:
    """The Compare page's actions over one service."""

    def __init__(self, service: ComparisonService) -> None:
        self.service = service
        # A panel redraws when its value differs from the last one: the number makes every answer a new one.
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """A number that no panel's value has held yet."""
        return next(self._numbers)

    def stage(self, comparison_id: str | None) -> Value:
        """The stage's value that shows a comparison, or the empty stage."""
        return {"comparison": comparison_id, "at": self.number()}

    def notice(self, text: str = "", kind: str = "error") -> Value:
        return {"text": text, "kind": kind, "at": self.number()}

    def send(self, prompt: str, form: Mapping[str, Any], stage: Value) -> tuple[Value, Value]:
        """Start a comparison. Returns the stage and the notice; on a refusal the stage stays as it was."""
        if self.service.is_active(stage.get("comparison")):
            return stage, self.notice(BUSY)
        try:
            comparison_id = self.service.start(prompt, CompareSettings.from_flat(flat_from_form(form)))
        except SaguaroError as error:
            return stage, self.notice(str(error))
        return self.stage(comparison_id), self.notice()

    def stop(self, stage: Value) -> None:
        """Stop what the stage shows; its lanes report the rest."""
        if comparison_id := stage.get("comparison"):
            self.service.stop(comparison_id)

    def open_address(self, comparison_id: str | None) -> Value:
        """What a fresh page shows: the comparison that its address names."""
        return self.stage(comparison_id or None)

    def reuse(self, comparison_id: str) -> tuple[tuple[str, Value] | None, Value]:
        """Prompt and form values of a comparison, and the notice, which says why there are none."""
        try:
            comparison = self.service.find(comparison_id)
        except SaguaroError as error:
            return None, self.notice(str(error))
        if comparison is None:
            return None, self.notice("This comparison is gone: it was deleted.")
        return (comparison.prompt, form_from_flat(comparison.settings)), self.notice()


def flat_from_form(form: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings from the form's values. What cannot be read goes on as it is, to be refused by name."""
    flat = dict(form)
    for name in _WHOLE_NUMBERS:
        flat[name] = _read(int, form[name])
    for name in _OPTIONAL_NUMBERS:
        flat[name] = _read(float, form[name]) if str(form[name] or "").strip() else None
    flat["stop"] = [line for line in str(form["stop"] or "").splitlines() if line]
    flat["fan_out_list"] = _read(_whole_numbers, form["fan_out_list"]) if form["fan_out"] == "list" else []
    return flat


def form_from_flat(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The form's values for flat settings: the inverse of flat_from_form."""
    texts = {name: str(flat[name]) for name in _WHOLE_NUMBERS}
    texts |= {name: "" if flat[name] is None else str(flat[name]) for name in _OPTIONAL_NUMBERS}
    lists = {"stop": "\n".join(flat["stop"]), "fan_out_list": ", ".join(map(str, flat["fan_out_list"]))}
    return {**flat, **texts, **lists}


def _read(kind: Callable[[str], Any], text: Any) -> Any:
    """The value that a text stands for, or the text itself if it stands for none."""
    try:
        return kind(str(text))
    except ValueError:
        return text


def _whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.replace(",", " ").split()]
