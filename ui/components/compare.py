"""The Compare page: prompt, notices, the stage with its lanes, and the settings beside them."""

from dataclasses import dataclass

import gradio as gr

from ui.components.panel import create_panel
from ui.components.settings_form import SettingsForm, create_settings_form
from ui.settings import EXAMPLES

STAGE = """
<div class="stage">
  <div class="stage-caption"></div>
  <div class="stage-summary" hidden></div>
  <div class="stage-lanes"></div>
  <ul class="stage-legend" aria-label="What the colours mean"></ul>
  <details class="stage-devices" open hidden><summary>Both devices over time</summary>
    <ul class="span-legend" aria-label="Kinds of work">
      <li data-kind="prefill">prefill</li><li data-kind="verify">verify</li><li data-kind="build">build cache</li>
      <li data-kind="step">draft</li><li data-kind="fallback">fallback</li><li data-kind="wait">wait</li>
      <li data-kind="hit">hit</li><li data-kind="miss">miss</li><li data-kind="first">first, empty cache</li>
      <li class="hint">scroll zooms, drag moves, double-click shows all</li></ul>
    <div class="stage-timelines"></div></details>
</div>
"""


@dataclass(frozen=True, slots=True)
class ComparePage:
    """The elements that handlers read and write."""

    prompt: gr.Textbox
    send: gr.Button
    stop: gr.Button
    examples: dict[str, gr.Button]
    notice: gr.HTML
    stage: gr.HTML
    form: SettingsForm


def create_compare() -> ComparePage:
    with gr.Row(elem_id="compare"):
        with gr.Column(elem_id="compare-main", min_width=0, scale=1):
            with gr.Group(elem_id="composer"):
                prompt = gr.Textbox(
                    lines=1, max_lines=10, show_label=False, container=False, autofocus=True, elem_id="prompt",
                    placeholder="Ask something. All three lanes answer the same prompt.", label="Prompt",
                )  # fmt: skip
                with gr.Row(elem_id="composer-bar"):
                    examples = {
                        name: gr.Button(name, size="sm", elem_classes="chip", min_width=0, scale=0) for name in EXAMPLES
                    }
                    gr.Button(
                        "Settings", size="sm", elem_classes="chip", elem_id="settings-toggle", min_width=0, scale=0
                    )
                    send = gr.Button("Send", variant="primary", size="sm", elem_id="send", min_width=0, scale=0)
                    stop = gr.Button("Stop", variant="stop", size="sm", elem_id="stop", min_width=0, scale=0)
            notice = create_panel("notice", '<div class="notices"></div>')
            stage = create_panel("stage", STAGE, {"comparison": None, "at": 0}, events=("reuse",))
        with gr.Column(elem_id="settings", min_width=0, scale=0):
            form = create_settings_form()
    return ComparePage(prompt, send, stop, examples, notice, stage, form)
