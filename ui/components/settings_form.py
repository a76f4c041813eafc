"""The settings panel. Its bounds only shape the controls: the config classes judge what is sent.

Numbers without a slider are texts: the framework's number field turns an empty one into 0 and rounds large seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from saguaro_core.config import MAX_BUDGET, MAX_LOOKAHEAD, MODES
from ui.settings import CUSTOM, PRESETS, CompareSettings, without_effect

LANE_CHOICES = [("AR", "ar"), ("SD", "sd"), ("SSD", "ssd")]


@dataclass(frozen=True, slots=True)
class SettingsForm:
    """`fields` maps each flat setting's name to its control."""

    preset: gr.Dropdown
    fields: dict[str, gr.components.Component]


def create_settings_form() -> SettingsForm:
    values = CompareSettings().flat()
    with gr.Column(elem_id="settings-panel"):
        preset = gr.Dropdown([*PRESETS, CUSTOM], value="Greedy", label="Preset", elem_id="preset")
        fields: dict[str, gr.components.Component] = {
            "modes": gr.CheckboxGroup(LANE_CHOICES, value=[*MODES], label="Lanes"),
            **_sampling(values),
            **_speculation(values),
        }
        with gr.Accordion("More", open=False):
            fields |= _more(values)
    return SettingsForm(preset, fields)


def _slider(low: float, high: float, value: float, step: float, label: str, info: str, **more: Any) -> gr.Slider:
    """A slider whose typed value reaches the config classes unjudged, so that their message is the one shown."""
    slider = gr.Slider(low, high, value=value, step=step, label=label, info=info, buttons=[], **more)
    unjudged: Callable[[Any], Any] = lambda payload: payload  # noqa: E731
    setattr(slider, "preprocess", unjudged)  # noqa: B010
    return slider


def _sampling(values: dict[str, Any]) -> dict[str, gr.components.Component]:
    temperature = _slider(0, 2, values["temperature"], 0.05, "Temperature", "0 is greedy")
    with gr.Row(elem_classes="short-fields"):
        limit = gr.Textbox(str(values["max_new_tokens"]), label="Max new tokens", min_width=0)
        seed = gr.Textbox(str(values["seed"]), label="Seed", min_width=0)
    return {"temperature": temperature, "max_new_tokens": limit, "seed": seed}


def _speculation(values: dict[str, Any]) -> dict[str, gr.components.Component]:
    return {
        "lookahead": _slider(1, MAX_LOOKAHEAD, values["lookahead"], 1, "Lookahead K", "tokens per speculation"),
        "rule": gr.Radio(
            [("Shared noise", "shared_noise"), ("Rejection", "rejection")], value=values["rule"], label="Verification",
            info="lossless both; shared noise keeps lanes equal",
        ),
        "fan_out": gr.Radio(
            [("Confident", "confident"), ("Geometric", "geometric"), ("Uniform", "uniform"), ("List", "list")],
            value=values["fan_out"], label="Fan-out", info="the shape of the cache (SSD)",
        ),
        "budget": _slider(1, MAX_BUDGET, values["budget"], 1, "Budget B", "outcomes in the cache"),
        "fan_out_list": gr.Textbox(
            "", label="Fan-out list", info="K + 1 counts: F_0, F_1, ... F_K", placeholder="4, 3, 2, 3", visible=False
        ),
        "saguaro_c": _slider(
            0, 1, values["saguaro_c"], 0.05, "Saguaro C", without_effect(values["rule"], values["temperature"]) or "",
            interactive=False,
        ),
        "fallback": gr.Radio(
            [("Auto", "auto"), ("Neural", "neural"), ("Fast", "fast")], value=values["fallback"], label="Fallback",
            info="what speculates after a cache miss (SSD)",
        ),
    }  # fmt: skip


def _more(values: dict[str, Any]) -> dict[str, gr.components.Component]:
    return {
        "system_prompt": gr.Textbox(values["system_prompt"], label="System prompt", lines=2, max_lines=6),
        "top_p": _slider(0, 1, values["top_p"], 0.01, "Top-p", "1 switches it off"),
        "top_k": gr.Textbox(str(values["top_k"]), label="Top-k", info="0 switches it off"),
        "stop": gr.Textbox("", label="Stop strings", info="one a line", lines=2, max_lines=8),
        "acceptance": gr.Textbox("", label="Fix acceptance a", info="empty: estimated as it runs"),
        "power_law_r": gr.Textbox("", label="Fix power law r", info="empty: estimated as it runs"),
    }
