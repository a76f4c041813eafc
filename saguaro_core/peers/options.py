"""The benchmark's options for the comparison with peers."""

import argparse
from pathlib import Path

from saguaro_core.bench_measure import BenchPlan
from saguaro_core.errors import InvalidRequest
from saguaro_core.peers.kinds import PeerOptions

_SHORTEST, _LONGEST = 1.0, 86_400.0


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Add --peers and what belongs to it."""
    defaults = PeerOptions()
    add = parser.add_argument
    add("--peers", action="store_true", help="compare with transformers and llama.cpp on the same prompts and cores")
    add("--peers-node", type=Path, metavar="FOLDER", help="where node-llama-cpp was installed (the current folder)")
    add("--peers-timeout", type=float, default=defaults.timeout, help="seconds for one peer's process (%(default)g)")
    add("--peers-compile", action="store_true", help="try transformers compiled too: a minute more for each process")


def read_peer_options(options: argparse.Namespace, plan: BenchPlan) -> PeerOptions | None:
    """The options if a comparison is asked for. Raises InvalidRequest where it would compare nothing."""
    if not options.peers:
        return None
    if plan.sampling.temperature != 0:
        raise InvalidRequest(f"temperature is {plan.sampling.temperature}: --peers compares greedy answers, give 0.")
    if "ar" not in plan.modes:
        raise InvalidRequest(f"modes is {','.join(plan.modes)!r}: --peers compares with our AR, add ar.")
    if not _SHORTEST <= options.peers_timeout <= _LONGEST:
        raise InvalidRequest(f"peers_timeout is {options.peers_timeout}: give seconds from 1 to 86400.")
    if options.peers_node is not None and not options.peers_node.is_dir():
        raise InvalidRequest(f"peers_node is {str(options.peers_node)!r}: give the folder where npm installed it.")
    return PeerOptions(node_folder=options.peers_node, timeout=options.peers_timeout, compile=options.peers_compile)
