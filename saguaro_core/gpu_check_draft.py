"""The draft process of the rounds check: random weights, a script's words, and the real draft server.

Run by the check as `python -m saguaro_core.gpu_check_draft`; not for hand use.
"""

import logging

import torch

from saguaro_core.checks.oracle import OracleRunner, Script
from saguaro_core.checks.random_models import LLAMA_1B, TINY, Shape, make_fixed_runner, make_random_model
from saguaro_core.draft.child import connect_to_parent, disconnect
from saguaro_core.draft.link import Link
from saguaro_core.draft.messages import DraftFailed, DraftLoaded, LoadDraft
from saguaro_core.draft.process import DraftServer
from saguaro_core.draft.speculator import Speculator
from saguaro_core.errors import describe
from saguaro_core.models.placement import DevicePlan, occupy
from saguaro_core.status import ModelInfo

_FIRST_MESSAGE_SECONDS = 60.0
_SHAPES = {shape.name: shape for shape in (LLAMA_1B, TINY)}


def script_for(shape: Shape) -> Script:
    """What both sides of the rounds check say: the draft is right four times of five."""
    return Script(vocabulary_size=shape.vocabulary_size, length=4096, acceptance=0.8, second_share=0.8)


def main() -> None:
    """Serve the parent process."""
    logging.basicConfig(level=logging.WARNING, format="draft: %(levelname)s %(name)s: %(message)s")
    link = connect_to_parent()
    try:
        message = link.receive(_FIRST_MESSAGE_SECONDS)
        if isinstance(message, LoadDraft):
            _serve(link, message)
    finally:
        disconnect(link)


def _serve(link: Link, message: LoadDraft) -> None:
    try:
        server = DraftServer(link)
        server.speculator = _load(link, message)
    except Exception as error:  # The check must hear of it, whatever it is.
        link.send(DraftFailed(message=describe(error)))
        return
    server.run()


def _load(link: Link, message: LoadDraft) -> Speculator:
    """A speculator over random weights of the shape that the message names."""
    shape, device = _SHAPES[message.draft], message.device
    occupy(DevicePlan((device,), message.cores))
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = make_random_model(shape, device, dtype, seed=1)
    runner = make_fixed_runner(model, device)
    runner.prepare()
    oracle = OracleRunner(runner, script_for(shape).draft_ids())
    info = ModelInfo(
        name=f"random weights in the shape of a {shape.name} model",
        revision="random",
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        cores=message.cores,
        num_parameters=sum(p.numel() for p in model.parameters()),
        vocabulary_size=shape.vocabulary_size,
        context_length=oracle.context_length,
        memory_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
    )
    speculator = Speculator(oracle, device=torch.device(device))
    link.send(DraftLoaded(info=info, num_columns=shape.vocabulary_size))
    return speculator


if __name__ == "__main__":
    main()
