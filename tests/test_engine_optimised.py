"""Without assertions (`python -O`) the three modes do the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

DECODE = """
import json, sys, threading
from saguaro_core.config import EngineConfig, GenerationRequest, MODES, Message, SamplingParams
from saguaro_core.engine import Engine
from saguaro_core.events import RunFinished

def decode(engine, mode):
    over, finished = threading.Event(), []
    def on_event(event):
        if isinstance(event, RunFinished):
            finished.append(event)
            over.set()
    request = GenerationRequest(
        messages=(Message(role="user", content="Write three lines about the sea."),),
        mode=mode,
        sampling=SamplingParams(temperature=0.8, seed=3, max_new_tokens=16),
    )
    engine.submit(mode, request, on_event)
    if not over.wait(120):
        raise SystemExit("no end of the run")
    return {"status": finished[0].status, "ids": finished[0].token_ids, "drafted": finished[0].figures.num_draft_tokens}

def main():
    with Engine(EngineConfig()) as engine:
        engine.wait_ready(300)
        runs = {mode: decode(engine, mode) for mode in MODES}
    print(json.dumps({"assertions": __debug__, "runs": runs}))

main()
"""


def test_all_modes_agree_without_assertions(default_target_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-c", DECODE],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=Path(__file__).parent.parent,
        # The environment reaches the engine and draft processes, which the option alone does not.
        env={**os.environ, "PYTHONOPTIMIZE": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["assertions"] is False
    ar, sd, ssd = (said["runs"][mode] for mode in ("ar", "sd", "ssd"))
    assert ar["status"] == sd["status"] == ssd["status"] == "finished"
    assert ar["ids"] == sd["ids"] == ssd["ids"]
    assert len(ar["ids"]) == 16
    assert (ar["drafted"] == 0, sd["drafted"] > 0, ssd["drafted"] > 0) == (True, True, True)
