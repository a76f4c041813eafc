"""A Python peer's process: `python -m saguaro_core.peers.child` with a job on standard input; not for hand use.

The libraries are imported after the process has its cores and threads. Whatever they print goes to standard error:
standard output carries the result alone.
"""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from saguaro_core.errors import describe
from saguaro_core.peers.protocol import Job, Output, Variant, VariantResult, decode_job

Decode = Callable[[Job, Variant], VariantResult]


def main() -> int:
    """Do the one job and write its output; a variant that fails says so in its place."""
    result_stream = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    output = do_job(decode_job(sys.stdin.buffer.read()))
    with result_stream:
        result_stream.write(msgspec.json.encode(output) + b"\n")
    return 0


def do_job(job: Job) -> Output:
    """Decode the job's prompts in every variant, one after the other."""
    decode = _prepare(job)
    results = []
    for variant in job.variants:
        try:
            results.append(decode(job, variant))
        except Exception as error:  # The library is not ours: whatever it raises is this variant's result.
            results.append(VariantResult(error=describe(error)))
        gc.collect()
    return Output(results=tuple(results), peak_memory_bytes=peak_memory_bytes())


def _prepare(job: Job) -> Decode:
    if job.peer.startswith("llama"):
        from saguaro_core.peers import llama_cpp_peer

        return llama_cpp_peer.decode
    import torch

    from saguaro_core.peers import transformers_peer

    torch.set_num_threads(len(job.cores))
    return transformers_peer.decode


def peak_memory_bytes() -> int | None:
    """The most memory that this process held at once; the kernel's figure for it alone, not its parent's.

    None where the system does not tell.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


if __name__ == "__main__":
    sys.exit(main())
