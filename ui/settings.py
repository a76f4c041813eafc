"""The settings of one comparison as one flat object: what the form, the API and the history exchange.

The names are those of SamplingParams and SpeculationConfig, plus `system_prompt` and `modes`; the config classes
judge the values, so the page and the API refuse the same things with the same words.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from saguaro_core.config import (
    MODES,
    GenerationRequest,
    Message,
    Mode,
    SamplingParams,
    SpeculationConfig,
)
from saguaro_core.errors import InvalidRequest

SAMPLING_NAMES = tuple(f.name for f in fields(SamplingParams))
SPECULATION_NAMES = tuple(f.name for f in fields(SpeculationConfig))
OWN_NAMES = ("system_prompt", "modes")
NAMES = (*SAMPLING_NAMES, *SPECULATION_NAMES, *OWN_NAMES)
MAX_PROMPT_CHARACTERS = 200_000


def check_text(name: str, text: object) -> str:
    """Return `text` if it is a text that can be stored and sent; raises InvalidRequest."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is {text!r}: give a text.")
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise InvalidRequest(f"{name} has {len(text)} characters: give at most {MAX_PROMPT_CHARACTERS}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} holds {text[error.start]!r}, half of a character: remove it.") from error
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """Everything of a comparison but its prompt. `modes` run in the fixed order ar, sd, ssd."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    system_prompt: str = ""
    modes: tuple[Mode, ...] = MODES

    def __post_init__(self) -> None:
        check_text("system_prompt", self.system_prompt)
        if self.modes == ():
            raise InvalidRequest("modes is empty: choose at least one lane, AR, SD or SSD.")
        if not isinstance(self.modes, tuple) or not set(self.modes) <= set(MODES):
            raise InvalidRequest(f"modes is {self.modes!r}: choose one or more of {', '.join(MODES)}.")

    @classmethod
    def from_flat(cls, data: Mapping[str, Any] | None) -> Self:
        """Build from flat names; missing ones take their defaults. Raises InvalidRequest for unknown names."""
        if data is None:
            return cls()
        if not isinstance(data, Mapping):
            raise InvalidRequest(f"settings is {data!r}: give an object of named settings.")
        for name in data:
            if name not in NAMES:
                raise InvalidRequest(f"setting {name!r} is {data[name]!r}: known settings: {', '.join(NAMES)}.")
        modes = data.get("modes", MODES)
        if isinstance(modes, str):
            raise InvalidRequest(f"modes is {modes!r}: give a list, such as ['ssd'].")
        if isinstance(modes, (list, tuple)) and all(isinstance(mode, str) for mode in modes):
            unknown = [mode for mode in modes if mode not in MODES]
            modes = tuple(mode for mode in MODES if mode in modes) if not unknown else tuple(modes)
        return cls(
            sampling=SamplingParams.from_mapping({k: v for k, v in data.items() if k in SAMPLING_NAMES}),
            speculation=SpeculationConfig.from_mapping({k: v for k, v in data.items() if k in SPECULATION_NAMES}),
            system_prompt=data.get("system_prompt", ""),
            modes=modes,
        )

    def flat(self) -> dict[str, Any]:
        """The same settings under their flat names, as plain JSON data."""
        data = {
            **asdict(self.sampling),
            **asdict(self.speculation),
            "system_prompt": self.system_prompt,
            "modes": self.modes,
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in data.items()}

    def request(self, message: str, mode: Mode) -> GenerationRequest:
        """What the engine gets for one lane. Raises InvalidRequest for an empty or unusable prompt."""
        messages = [Message(role="user", content=check_text("the prompt", message))]
        if self.system_prompt.strip():
            messages.insert(0, Message(role="system", content=self.system_prompt))
        return GenerationRequest(
            messages=tuple(messages),
            mode=mode,
            sampling=self.sampling,
            speculation=self.speculation,
            # Lanes are compared: none may find the prompt read by the one before it.
            reuse_prefix=False,
        )


def without_effect(rule: str, temperature: float) -> str | None:
    """Why Saguaro's C changes nothing under these settings, or None where it does."""
    if rule == "shared_noise":
        return "C has no effect under shared noise: the draft's distribution is not part of that rule."
    if temperature == 0:
        return "C has no effect at temperature 0: the answer is greedy, nothing is sampled."
    return None


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "Greedy": {"temperature": 0.0, "rule": "shared_noise", "top_p": 1.0, "top_k": 0, "saguaro_c": 1.0},
    "Sampled, same tokens": {"temperature": 0.8, "rule": "shared_noise", "top_p": 1.0, "top_k": 0, "saguaro_c": 1.0},
    "Rejection sampling": {"temperature": 0.8, "rule": "rejection", "top_p": 1.0, "top_k": 0, "saguaro_c": 1.0},
    "Rejection, C = 0.5": {"temperature": 0.8, "rule": "rejection", "top_p": 1.0, "top_k": 0, "saguaro_c": 0.5},
}
# The settings that presets set, all the same ones.
PRESET_NAMES = tuple(PRESETS["Greedy"])
CUSTOM = "Custom"


def preset_of(form: Mapping[str, Any]) -> str:
    """The preset whose settings the form shows, or Custom. The form has some numbers as texts."""
    for name, preset in PRESETS.items():
        if all(_shows(form[setting], value) for setting, value in preset.items()):
            return name
    return CUSTOM


def _shows(shown: Any, value: Any) -> bool:
    try:
        return bool(shown == value or float(shown) == value)
    except (TypeError, ValueError):  # No number.
        return False


EXAMPLES: Mapping[str, str] = {
    "Predictable": "Write a Python function that returns the n-th Fibonacci number, and show how to call it.",
    "Creative": "Write a short story about a lighthouse keeper who collects lost sounds.",
}
