"""One end of a message link between two processes: ZeroMQ, one peer, typed messages, every wait bounded.

On one machine the link is a socket file in a private folder; where that is missing, and between machines, it is TCP
encrypted with CURVE, whose server key only the peer is told (on its standard input).
"""

import contextlib
import shutil
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq

from saguaro_core.draft.messages import Message, decode, encode

_LINGER_MS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAddress:
    """Where a listening end can be reached; `server_key` is empty for a socket file."""

    endpoint: str
    server_key: str = ""

    def remove_folder(self) -> None:
        """Remove the private folder of a socket file; nothing happens for other addresses or if it is gone."""
        if self.endpoint.startswith("ipc://"):
            shutil.rmtree(Path(self.endpoint.removeprefix("ipc://")).parent, ignore_errors=True)


class Link:
    """Sends and receives messages in order. Not thread-safe: one thread owns it."""

    def __init__(self, socket: "zmq.Socket[bytes]", address: LinkAddress, *, is_listening: bool) -> None:
        self.socket, self.address, self._is_listening = socket, address, is_listening
        self._received: deque[Message] = deque()
        self._unsent: deque[list[bytes]] = deque()

    @classmethod
    def listen(cls, *, tcp_host: str | None = None) -> Self:
        """Open the listening end on a fresh address: a socket file, or TCP on `tcp_host` (loopback where there are
        no socket files).
        """
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        socket.linger = _LINGER_MS
        if tcp_host is None and zmq.has("ipc"):
            folder = Path(tempfile.mkdtemp(prefix="saguaro-"))
            address = LinkAddress(endpoint=f"ipc://{folder}/link")
            socket.bind(address.endpoint)
            return cls(socket, address, is_listening=True)
        public, secret = zmq.curve_keypair()
        socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, public, secret
        port = socket.bind_to_random_port(f"tcp://{tcp_host or '127.0.0.1'}")
        address = LinkAddress(endpoint=f"tcp://{tcp_host or '127.0.0.1'}:{port}", server_key=public.decode())
        return cls(socket, address, is_listening=True)

    @classmethod
    def connect(cls, address: LinkAddress) -> Self:
        """Open the other end."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        socket.linger = _LINGER_MS
        if address.server_key:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = address.server_key.encode()
        socket.connect(address.endpoint)
        return cls(socket, address, is_listening=False)

    def send(self, *messages: Message) -> None:
        """Queue messages for the peer as one delivery; returns at once, whether or not a peer is there."""
        if messages:
            self.send_frames([frame for message in messages for frame in encode(message)])

    def send_frames(self, frames: list[bytes]) -> None:
        """Same as send for messages that are encoded already."""
        self._unsent.append(frames)
        self._flush()

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None if none came within `timeout` seconds (0: only what is already here).

        Delivers on the way what could not be sent before, because the peer had not connected yet or was behind.
        """
        deadline = time.monotonic() + timeout
        while not self._received and self._await_socket(deadline):
            frames = self.socket.recv_multipart()
            self._received.extend(decode(*pair) for pair in zip(frames[::2], frames[1::2], strict=True))
        return self._received.popleft() if self._received else None

    def has_message(self) -> bool:
        """Whether receive would return a message at once."""
        # Not poll: that makes a poller each time, and this is asked between the layers of a forward.
        return bool(self._received) or bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _await_socket(self, deadline: float) -> bool:
        """Whether something can be read before the deadline."""
        while True:
            self._flush()
            events = zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0)
            left = deadline - time.monotonic()
            ready = self.socket.poll(max(0, round(left * 1000)), events)
            if ready & zmq.POLLIN or not ready:
                return bool(ready)

    def _flush(self) -> None:
        # A listening socket without a peer blocks on a plain send, and a peer that died never comes back.
        with contextlib.suppress(zmq.Again):
            while self._unsent:
                self.socket.send_multipart(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()

    def close(self) -> None:
        """Close the socket; the listening end also removes its socket file."""
        self.socket.close()
        if self._is_listening:
            self.address.remove_folder()
