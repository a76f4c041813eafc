"""The History page: search, filters, and the list."""

from dataclasses import dataclass

import gradio as gr

from saguaro_core.config import MODES
from storage.records import STORED_STATUSES
from ui.components.panel import create_panel

HISTORY = '<div class="history"><ul class="history-list"></ul><div class="history-foot"></div></div>'
ANY = ""


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """The elements that handlers read and write."""

    search: gr.Textbox
    mode: gr.Dropdown
    status: gr.Dropdown
    notice: gr.HTML
    listing: gr.HTML


def create_history() -> HistoryPage:
    with gr.Column(elem_id="history"):
        with gr.Row(elem_id="history-filters"):
            search = gr.Textbox(
                label="Search", placeholder="Words of a prompt or an answer", elem_id="history-search", scale=3
            )
            mode = gr.Dropdown([("Any mode", ANY), *((m.upper(), m) for m in MODES)], value=ANY, label="Mode", scale=1)
            status = gr.Dropdown(
                [("Any status", ANY), *((s.capitalize(), s) for s in STORED_STATUSES)], value=ANY, label="Status",
                elem_id="history-status", scale=1,
            )  # fmt: skip
        notice = gr.HTML(
            {}, html_template='<div class="notices"></div>', apply_default_css=False, elem_id="history-notice",
            js_on_load="import('/ui/notice.js').then((panel) => panel.mount(element, trigger, props, watch));",
        )  # fmt: skip
        listing = create_panel("history", HISTORY, events=("pick", "erase", "turn"))
    return HistoryPage(search, mode, status, notice, listing)
