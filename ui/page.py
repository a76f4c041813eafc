"""The page: three tabs over one service. `create_ui` builds it and returns it; serving it is server.py's job."""

from typing import Any

import gradio as gr
from gradio.events import api as public_endpoint

from ui.api import compare_endpoint
from ui.comparisons import ComparisonService
from ui.components.compare import ComparePage, create_compare
from ui.components.history import HistoryPage, create_history
from ui.components.panel import create_panel
from ui.handlers import Handlers
from ui.history_handlers import HistoryHandlers
from ui.run_log import StoredRunLog
from ui.settings import EXAMPLES, PRESET_NAMES, PRESETS, preset_of, without_effect

HEADER = """
<header class="title">
  <svg viewBox="0 0 24 24" width="30" height="30" aria-hidden="true" fill="none" stroke="currentColor"
    stroke-width="3.2" stroke-linecap="round" stroke-linejoin="round">
    <path d="M12 21V4M12 14H8a2 2 0 0 1-2-2V9M12 12h4a2 2 0 0 0 2-2V7"/></svg>
  <h1>Saguaro</h1><p>one prompt, three decoders, the same answer</p><div class="title-right"></div>
</header>
"""
# The event loops of the page's own handlers: internal, quick, and never waiting for a decode.
PRIVATE: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
DIRECT: dict[str, Any] = {**PRIVATE, "queue": False}


def create_ui(service: ComparisonService, log: StoredRunLog | None = None) -> gr.Blocks:
    """Compose the page over a service; without a log there is no History."""
    handlers = Handlers(service)
    page: gr.Blocks
    with gr.Blocks(title="Saguaro playground", fill_width=True, analytics_enabled=False) as page:
        create_panel("header", HEADER)
        with gr.Tabs(elem_id="pages") as tabs:
            with gr.Tab("Compare", id="compare"):
                compare = create_compare()
            if log is not None:
                with gr.Tab("History", id="history") as history_tab:
                    history = create_history()
            with gr.Tab("Model", id="model"):
                create_panel("model", '<div class="model"></div>')
        _wire_compare(page, compare, handlers)
        _wire_settings(compare)
        if log is not None:
            _wire_history(history, history_tab, tabs, compare, HistoryHandlers(handlers, log))
        public_endpoint(compare_endpoint(service), api_name="compare", concurrency_limit=None)
    return page


def _wire_compare(page: gr.Blocks, compare: ComparePage, handlers: Handlers) -> None:
    fields = compare.form.fields

    def send(data: dict[Any, Any]) -> dict[Any, Any]:
        form = {name: data[field] for name, field in fields.items()}
        stage, notice = handlers.send(data[compare.prompt] or "", form, data[compare.stage] or {})
        return {compare.stage: stage, compare.notice: notice}

    def reuse(event: gr.EventData) -> dict[Any, Any]:
        found, notice = handlers.reuse(str(event.comparison))
        if found is None:
            return {compare.notice: notice}
        prompt, form = found
        return {
            compare.notice: notice,
            compare.prompt: prompt,
            **{fields[name]: value for name, value in form.items() if name in fields},
        }

    def open_address(request: gr.Request) -> dict[str, Any]:
        return handlers.open_address(request.query_params.get("comparison"))

    inputs = {compare.prompt, compare.stage, *fields.values()}
    triggers = [compare.send.click, compare.prompt.submit]
    gr.on(triggers, send, inputs=inputs, outputs=[compare.stage, compare.notice], **DIRECT)
    compare.stop.click(handlers.stop, inputs=compare.stage, outputs=None, **DIRECT)
    compare.stage.reuse(reuse, inputs=None, outputs=[compare.prompt, compare.notice, *fields.values()], **DIRECT)
    page.load(open_address, inputs=None, outputs=compare.stage, **DIRECT)
    for name, button in compare.examples.items():
        button.click(lambda text=EXAMPLES[name]: text, inputs=None, outputs=compare.prompt, **DIRECT)


def _wire_settings(compare: ComparePage) -> None:
    fields = compare.form.fields

    def apply_preset(name: str) -> Any:
        # Custom sets nothing: it is what the form shows.
        return {fields[field]: value for field, value in PRESETS[name].items()} if name in PRESETS else gr.skip()

    def show_c(rule: str, temperature: Any) -> Any:
        reason = without_effect(rule, temperature if isinstance(temperature, (int, float)) else 0)
        return gr.update(interactive=reason is None, info=reason or "less draft mass on cached tokens, more hits")

    def show_shape(fan_out: str) -> tuple[Any, Any]:
        return gr.update(visible=fan_out != "list"), gr.update(visible=fan_out == "list")

    def name_preset(*values: Any) -> str:
        return preset_of(dict(zip(PRESET_NAMES, values, strict=True)))

    compare.form.preset.input(apply_preset, compare.form.preset, [*fields.values()], **DIRECT)
    # After every change, by hand or not: what a preset itself sets is found to be that preset again.
    preset_fields = [fields[name] for name in PRESET_NAMES]
    changes = [field.change for field in preset_fields]  # type: ignore[attr-defined]
    gr.on(changes, name_preset, preset_fields, compare.form.preset, trigger_mode="always_last", **DIRECT)
    for name in ("rule", "temperature"):
        fields[name].change(show_c, [fields["rule"], fields["temperature"]], fields["saguaro_c"], **DIRECT)  # type: ignore[attr-defined]
    fields["fan_out"].change(  # type: ignore[attr-defined]
        show_shape, fields["fan_out"], [fields["budget"], fields["fan_out_list"]], **DIRECT
    )


def _wire_history(
    history: HistoryPage, tab: gr.Tab, tabs: gr.Tabs, compare: ComparePage, handlers: HistoryHandlers
) -> None:
    filters = [history.search, history.mode, history.status]
    outputs = [history.listing, history.notice]

    def turn(text: str, mode: str, status: str, event: gr.EventData) -> tuple[Any, Any]:
        return handlers.rows(text, mode, status, event.before)

    def erase(text: str, mode: str, status: str, event: gr.EventData) -> tuple[Any, Any]:
        return handlers.erase(str(event.comparison), text, mode, status)

    def pick(event: gr.EventData) -> tuple[Any, Any]:
        return handlers.handlers.stage(str(event.comparison)), gr.update(selected="compare")

    def refresh(text: str, mode: str, status: str) -> tuple[Any, Any]:
        return handlers.rows(text, mode, status)

    tab.select(refresh, filters, outputs, **DIRECT)
    # Not `input`, which a pasted text does not raise.
    history.search.change(refresh, filters, outputs, trigger_mode="always_last", **DIRECT)
    gr.on([history.mode.input, history.status.input, history.search.submit], refresh, filters, outputs, **DIRECT)
    history.listing.turn(turn, filters, outputs, **DIRECT)
    history.listing.erase(erase, filters, outputs, **DIRECT)
    history.listing.pick(pick, None, [compare.stage, tabs], **DIRECT)
