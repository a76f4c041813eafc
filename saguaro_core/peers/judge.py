"""Says how close the two tokens were where a peer's answer leaves the engine's: `python -m saguaro_core.peers.judge`.

The target in plain float32 scores both tokens over the whole context at once. A gap near 0 is a tie that rounding
decides; a large one means that the peer computes another function, such as one of quantised weights.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from saguaro_core.peers.launch import PeerFailed, run_process


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Where two answers part: what both had read until then, and the token that each went on with."""

    context: tuple[int, ...]
    ours: int
    theirs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """All that one process is asked; `target` is a name for the loader."""

    target: str
    questions: tuple[Question, ...]


def ask_judge(target: str, questions: Sequence[Question], cores: tuple[int, ...], timeout: float) -> list[float | None]:
    """For each question, our token's score minus theirs; None where the judge failed. Runs a process of its own."""
    if not questions:
        return []
    command = (sys.executable, "-P", "-m", "saguaro_core.peers.judge")
    data = msgspec.json.encode(Questions(target=target, questions=tuple(questions)))
    try:
        return list(msgspec.json.decode(run_process(command, data, cores, timeout), type=list[float]))
    except (PeerFailed, msgspec.DecodeError):
        return [None] * len(questions)


def score_gaps(asked: Questions) -> list[float]:
    """Our token's score minus theirs for each question, in this process."""
    import torch

    from saguaro_core.models.load import load_target

    model = load_target(asked.target, dtype=torch.float32).model
    gaps = []
    with torch.inference_mode():
        for question in asked.questions:
            logits = model(input_ids=torch.tensor([question.context]), logits_to_keep=1).logits[0, -1]
            gaps.append(float(logits[question.ours] - logits[question.theirs]))
    return gaps


def main() -> int:
    """Answer the questions on standard input; whatever libraries print goes to standard error."""
    result_stream = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    gaps = score_gaps(msgspec.json.decode(sys.stdin.buffer.read(), type=Questions))
    with result_stream:
        result_stream.write(msgspec.json.encode(gaps) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
