"""Panels that a module under ui/assets draws. Their template never changes and never holds a value.

What is shown arrives as data and becomes text nodes: text of a model or a user never passes through a template.
"""

from typing import Any

import gradio as gr


def create_panel(
    name: str, template: str, value: dict[str, Any] | None = None, events: tuple[str, ...] = ()
) -> gr.HTML:
    """An element drawn by /ui/NAME.js, which may raise `events`: the framework finds their quoted names."""
    quoted = ", ".join(f"'{event}'" for event in events)
    script = f"import('/ui/{name}.js').then((panel) => panel.mount(element, trigger, props, watch, [{quoted}]));"
    return gr.HTML(
        value=value or {}, html_template=template, js_on_load=script, apply_default_css=False, elem_id=f"panel-{name}"
    )
