"""The flat settings that page, API and history share."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saguaro_core.config import MODES, SamplingParams, SpeculationConfig
from saguaro_core.errors import InvalidRequest
from ui.handlers import flat_from_form, form_from_flat
from ui.settings import PRESETS, CompareSettings, preset_of, without_effect

FLAT = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_k": st.integers(0, 1000),
        "top_p": st.floats(0.01, 1),
        "seed": st.integers(0, 2**63 - 1),
        "max_new_tokens": st.integers(1, 10_000),
        "stop": st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1), max_size=8),
        "lookahead": st.integers(1, 16),
        "rule": st.sampled_from(["shared_noise", "rejection"]),
        "budget": st.integers(1, 64),
        "saguaro_c": st.floats(0, 1),
        "fallback": st.sampled_from(["auto", "neural", "fast"]),
        "acceptance": st.none() | st.floats(0.01, 0.99),
        "system_prompt": st.text(st.characters(codec="utf-8")),
        "power_law_r": st.none() | st.floats(0.01, 10),
        "modes": st.lists(st.sampled_from(MODES), min_size=1, max_size=3, unique=True),
    },
)


def test_defaults_are_those_of_the_config_classes() -> None:
    settings = CompareSettings.from_flat(None)
    assert settings.sampling == SamplingParams()
    assert settings.speculation == SpeculationConfig()
    assert settings.modes == MODES
    assert CompareSettings.from_flat({}) == settings


@given(FLAT)
def test_flat_settings_survive_json_and_the_form(flat: dict[str, Any]) -> None:
    settings = CompareSettings.from_flat(flat)
    again = CompareSettings.from_flat(json.loads(json.dumps(settings.flat())))
    assert again == settings
    assert CompareSettings.from_flat(flat_from_form(form_from_flat(settings.flat()))) == settings


def test_a_fan_out_list_comes_from_text() -> None:
    form = form_from_flat(CompareSettings.from_flat({"fan_out": "list", "fan_out_list": [4, 3, 2, 3, 1]}).flat())
    assert form["fan_out_list"] == "4, 3, 2, 3, 1"
    assert flat_from_form({**form, "fan_out_list": "1 2,3, 0"})["fan_out_list"] == [1, 2, 3, 0]
    with pytest.raises(InvalidRequest, match=r"fan_out_list is '1, x'"):
        CompareSettings.from_flat(flat_from_form({**form, "fan_out_list": "1, x"}))


def test_modes_keep_their_fixed_order() -> None:
    assert CompareSettings.from_flat({"modes": ["ssd", "ar"]}).modes == ("ar", "ssd")


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"lookahead": 0}, "lookahead is 0: give a whole number from 1 to 16"),
        ({"lookahead": 17}, "lookahead is 17"),
        ({"budget": 65}, "budget is 65: give a whole number from 1 to 64"),
        ({"temperature": float("nan")}, "temperature is nan: give a number from 0 to 2"),
        ({"temperature": None}, "temperature is None"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"stop": [""]}, "stop is"),
        ({"temprature": 1}, "setting 'temprature' is 1: known settings: temperature"),
        ({"modes": ["sd", "xx"]}, r"modes is \('sd', 'xx'\): choose one or more of ar, sd, ssd"),
        ({"modes": []}, "choose at least one lane"),
        ({"modes": "ssd"}, r"modes is 'ssd': give a list, such as \['ssd'\]"),
        ({"modes": [["ar"]]}, "modes is"),
        ({"system_prompt": 3}, "system_prompt is 3: give a text"),
        ([1], r"settings is \[1\]: give an object"),
    ],
)
def test_bad_settings_are_refused_by_name_with_a_remedy(flat: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        CompareSettings.from_flat(flat)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", r"^The prompt is empty: write something to answer\.$"),
        ("  \n", "The prompt is empty"),
        ("\ud800", "half of a character"),
        ("x" * 200_001, "200001 characters"),
    ],
)
def test_unusable_prompts_are_refused(prompt: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        CompareSettings().request(prompt, "ar")


def test_a_system_prompt_comes_first_and_a_blank_one_not_at_all() -> None:
    roles = [m.role for m in CompareSettings(system_prompt="Be brief.").request("hi", "sd").messages]
    assert roles == ["system", "user"]
    assert [m.role for m in CompareSettings(system_prompt=" ").request("hi", "sd").messages] == ["user"]


def test_c_says_where_it_has_no_effect() -> None:
    assert "shared noise" in (without_effect("shared_noise", 0.8) or "")
    assert "temperature 0" in (without_effect("rejection", 0) or "")
    assert without_effect("rejection", 0.8) is None


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_found_again_in_the_form(name: str) -> None:
    form = form_from_flat(CompareSettings.from_flat(PRESETS[name]).flat())
    assert preset_of(form) == name
    assert preset_of({**form, "seed": "7", "lookahead": 3}) == name  # No preset says anything about these.
    for setting, value in {"temperature": 1.3, "top_k": "40", "saguaro_c": 0.25, "top_p": None}.items():
        assert preset_of({**form, setting: value}) == "Custom"
