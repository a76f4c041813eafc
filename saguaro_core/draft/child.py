"""Starting and ending a child process that lives no longer than its parent.

The child gets its link address as one line on its standard input, which then stays open as a lifeline: when it
closes, because the parent closed it or died in whatever way, the child ends itself.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

import msgspec

from saguaro_core.draft.link import Link, LinkAddress
from saguaro_core.draft.messages import Shutdown

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class Child:
    """A child process running one of our modules, and the link to it."""

    def __init__(self, process: "subprocess.Popen[bytes]", link: Link) -> None:
        self.process, self.link = process, link

    @classmethod
    def spawn(cls, module: str) -> Self:
        """Start `python -m module` and hand it a fresh link."""
        link = Link.listen()
        path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
        # A child starts on its parent's cores and moves to its own; numba would count those that it starts with.
        counted = {"NUMBA_NUM_THREADS": str(os.cpu_count() or 1)}
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                env={**counted, **os.environ, "PYTHONPATH": path},
            )
        except OSError:
            link.close()
            raise
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(link.address) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # It died at once: is_alive says so.
        return cls(process, link)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def describe_end(self) -> str:
        """How the process ended, for a message to the user."""
        code = self.process.poll()
        if code is None:
            return "is still running"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"

    def close(self, timeout: float = 5.0) -> None:
        """Ask the process to end, then insist; close the link. Idempotent."""
        if self.is_alive:
            self.link.send(Shutdown())
            try:
                self.process.wait(timeout / 2)
            except subprocess.TimeoutExpired:
                self.process.terminate()
        self._close_lifeline()
        try:
            self.process.wait(timeout / 2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.link.close()

    def kill(self) -> None:
        """End the process at once, without asking."""
        self.process.kill()
        self.process.wait()
        self._close_lifeline()
        self.link.close()

    def _close_lifeline(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # The other end may be gone already.
                self.process.stdin.close()


def connect_to_parent() -> Link:
    """In a child: the link to the parent. From here on the process dies with its parent and leaves Ctrl-C to it.

    A polite end (SIGTERM) becomes SystemExit in the main thread, so that what is open is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    lifeline = sys.stdin.fileno()
    address = msgspec.json.decode(_read_line(lifeline), type=LinkAddress)
    link = Link.connect(address)

    def watch() -> None:
        # Straight from the descriptor: a thread blocked in a buffered reader would hold its lock at interpreter
        # shutdown.
        while os.read(lifeline, 1024):
            pass
        # A parent that was killed could not remove its socket file; one that lives would have no use for it.
        address.remove_folder()
        signal.raise_signal(signal.SIGTERM) if sys.platform == "win32" else os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    return link


def disconnect(link: Link) -> None:
    """In a child, last of all: close the link. A polite end that comes now ends the process at once.

    As SystemExit it would break into the interpreter's own end, with a trace on the terminal.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    link.close()


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise SystemExit("no link address came on standard input: this module is started by the engine.")
        line += byte
    return line
