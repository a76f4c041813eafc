"""What may be decoded together, and what is refused before anything starts."""

from typing import Any

import pytest

from saguaro_core.batch_request import check_batch
from saguaro_core.config import GenerationRequest, Message, SamplingParams, SpeculationConfig
from saguaro_core.errors import InvalidRequest


def request(**options: Any) -> GenerationRequest:
    return GenerationRequest(messages=(Message(role="user", content="x"),), **options)


@pytest.mark.parametrize("count", [0, 17])
def test_so_many_are_refused(count: int) -> None:
    with pytest.raises(InvalidRequest, match=f"the batch has {count} requests: give 1 to 16"):
        check_batch({str(number): request() for number in range(count)})


def test_mixed_modes_and_settings_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="'a' is ssd, 'b' is ar"):
        check_batch({"a": request(), "b": request(mode="ar")})
    other = SpeculationConfig(lookahead=5)
    with pytest.raises(InvalidRequest, match="those of 'b' differ from those of 'a'"):
        check_batch({"a": request(), "b": request(speculation=other)})


def test_seeds_limits_and_prompts_may_differ() -> None:
    check_batch({str(n): request(sampling=SamplingParams(seed=n, max_new_tokens=1 + n)) for n in range(16)})
