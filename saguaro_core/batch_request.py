"""What may be decoded together: a few requests of one mode and one speculation, each with its own prompt, sampling and
limits.
"""

from collections.abc import Mapping

from saguaro_core.config import GenerationRequest
from saguaro_core.errors import InvalidRequest

MAX_BATCH = 16


def check_batch(requests: Mapping[str, GenerationRequest]) -> None:
    """Raises InvalidRequest for requests, by run id, that cannot be a batch."""
    if not 1 <= len(requests) <= MAX_BATCH:
        raise InvalidRequest(f"the batch has {len(requests)} requests: give 1 to {MAX_BATCH}.")
    first_id, first = next(iter(requests.items()))
    for run_id, request in requests.items():
        if request.mode != first.mode:
            raise InvalidRequest(
                f"the batch mixes modes: {first_id!r} is {first.mode}, {run_id!r} is {request.mode}. "
                "Give requests of one mode."
            )
        if request.speculation != first.speculation:
            raise InvalidRequest(
                f"the batch mixes speculation settings: those of {run_id!r} differ from those of {first_id!r}. "
                "Give all requests the same."
            )
