"""Messages survive their encoding, and a link carries them between two ends: bounded waits, no strangers."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from strategies import EXACT, values

from saguaro_core.draft.link import Link, LinkAddress
from saguaro_core.draft.messages import (
    Begin,
    Configure,
    DraftFailed,
    Ended,
    Message,
    Shutdown,
    Speculation,
    Stop,
    Submit,
    Verified,
    decode,
    encode,
)
from saguaro_core.errors import InvalidRequest
from saguaro_core.events import RunFinished

KINDS = get_args(Message)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_survives_its_encoding(kind: Any) -> None:
    @EXACT
    @given(values(kind))
    def check(message: Message) -> None:
        name, body = encode(message)
        received = decode(name, body)
        assert received == message
        assert type(received) is kind
        for field in fields(kind):
            assert type(getattr(received, field.name)) is type(getattr(message, field.name)), field.name

    check()


def test_every_kind_travels_under_its_own_name() -> None:
    assert len({kind.__name__ for kind in KINDS}) == len(KINDS)
    assert {Begin, Verified, Speculation, Submit, Configure, RunFinished} <= set(KINDS)


@pytest.mark.parametrize("name", [b"Nothing", b"", b"\xff\xfe", b"dict", b"begin"])
def test_an_unknown_kind_is_refused_by_name(name: bytes) -> None:
    with pytest.raises(ValueError, match="is unknown: both ends must run the same version"):
        decode(name, b"\x80")


@pytest.mark.parametrize(
    ("name", "body"),
    [
        (b"Verified", msgspec.msgpack.encode({"epoch": 1})),
        (b"Verified", msgspec.msgpack.encode([1, 2, 3])),
        (b"Ended", msgspec.msgpack.encode({"epoch": "one"})),
        (b"Stop", b""),
        (b"Stop", b"\xc1"),
        (b"Begin", encode(Stop(run_id="x"))[1]),
    ],
    ids=["missing field", "not a map", "wrong type", "empty", "not MessagePack", "another kind's fields"],
)
def test_fields_that_do_not_fit_are_refused(name: bytes, body: bytes) -> None:
    with pytest.raises(ValueError):
        decode(name, body)


@EXACT
@given(st.binary(max_size=40))
def test_noise_never_raises_anything_else(body: bytes) -> None:
    for kind in KINDS:
        try:
            decode(kind.__name__.encode(), body)
        except ValueError:
            continue


def test_an_invalid_setting_is_refused_on_arrival() -> None:
    body = msgspec.msgpack.encode({"config": {"target": "", "draft": "d"}})
    with pytest.raises(InvalidRequest, match="catalogue name"):
        decode(b"Configure", body)


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _pair(stack: ExitStack, tcp_host: str | None) -> tuple[Link, Link]:
    listening = Link.listen(tcp_host=tcp_host)
    stack.callback(listening.close)
    connected = Link.connect(listening.address)
    stack.callback(connected.close)
    connected.send(Shutdown())
    assert listening.receive(5.0) == Shutdown()
    return listening, connected


@pytest.mark.parametrize("tcp_host", [None, "127.0.0.1"], ids=["socket file", "tcp with keys"])
class TestLink:
    def test_carries_messages_both_ways_in_order(self, ends: ExitStack, tcp_host: str | None) -> None:
        here, there = _pair(ends, tcp_host)
        sent = [Ended(epoch=number) for number in range(20)]
        for message in sent:
            here.send(message)
        assert [there.receive(5.0) for _ in sent] == sent
        there.send(*sent)
        assert [here.receive(5.0) for _ in sent] == sent
        assert here.receive(0.0) is None

    def test_a_wait_without_a_message_ends_in_time(self, ends: ExitStack, tcp_host: str | None) -> None:
        here, there = _pair(ends, tcp_host)
        for link in (here, there):
            started = time.monotonic()
            assert link.receive(0.15) is None
            assert 0.1 < time.monotonic() - started < 3.0
        started = time.monotonic()
        assert here.receive(0.0) is None
        assert time.monotonic() - started < 0.1

    def test_a_wait_ends_with_the_message(self, ends: ExitStack, tcp_host: str | None) -> None:
        here, there = _pair(ends, tcp_host)
        there.send(Stop(run_id="first"))
        assert here.receive(5.0) == Stop(run_id="first")
        timer = threading.Timer(0.1, lambda: there.send(Stop(run_id="second")))
        timer.start()
        started = time.monotonic()
        assert here.receive(30.0) == Stop(run_id="second")
        assert time.monotonic() - started < 10.0
        timer.join()

    def test_nothing_sent_is_nothing(self, ends: ExitStack, tcp_host: str | None) -> None:
        here, there = _pair(ends, tcp_host)
        here.send()
        here.send(Stop(run_id="x"))
        assert there.receive(5.0) == Stop(run_id="x")
        assert there.receive(0.05) is None

    def test_one_delivery_of_several_messages_arrives_as_several(self, ends: ExitStack, tcp_host: str | None) -> None:
        here, there = _pair(ends, tcp_host)
        sent: list[Message] = [Stop(run_id="x"), Ended(epoch=3), Shutdown()]
        here.send(*sent)
        assert [there.receive(5.0), there.receive(0.0), there.receive(0.0)] == sent

    def test_the_listening_end_may_speak_before_anyone_is_there(self, ends: ExitStack, tcp_host: str | None) -> None:
        here = Link.listen(tcp_host=tcp_host)
        ends.callback(here.close)
        started = time.monotonic()
        here.send(Stop(run_id="first"), Stop(run_id="second"))
        here.send(Stop(run_id="third"))
        assert here.receive(0.0) is None
        assert time.monotonic() - started < 1.0
        heard: list[Message | None] = []

        def other_end() -> None:
            there = Link.connect(here.address)
            heard.extend(there.receive(5.0) for _ in range(3))
            there.send(Shutdown())
            there.close()

        peer = threading.Thread(target=other_end)
        peer.start()
        assert here.receive(15.0) == Shutdown()
        peer.join()
        assert heard == [Stop(run_id="first"), Stop(run_id="second"), Stop(run_id="third")]

    def test_large_speculations_pass(self, ends: ExitStack, tcp_host: str | None) -> None:
        here, there = _pair(ends, tcp_host)
        message = Speculation(epoch=1, round_index=0, token_ids=(1,) * 16, distributions=bytes(3_000_000))
        here.send(message)
        assert there.receive(10.0) == message


class TestPrivacy:
    def test_a_socket_file_lies_in_a_private_folder_and_goes_with_the_link(self) -> None:
        link = Link.listen()
        path = Path(link.address.endpoint.removeprefix("ipc://"))
        assert path.exists()
        assert path.parent.stat().st_mode & 0o077 == 0
        link.close()
        assert not path.parent.exists()

    @pytest.mark.parametrize("has_wrong_key", [False, True], ids=["no key", "wrong key"])
    def test_a_stranger_gets_nothing_through_and_does_not_take_the_place(
        self, ends: ExitStack, has_wrong_key: bool
    ) -> None:
        here = Link.listen(tcp_host="127.0.0.1")
        ends.callback(here.close)
        wrong_key = zmq.curve_keypair()[0].decode() if has_wrong_key else ""
        stranger = Link.connect(LinkAddress(endpoint=here.address.endpoint, server_key=wrong_key))
        stranger.socket.linger = 0
        ends.callback(stranger.close)
        stranger.send(DraftFailed(message="let me in"))
        assert here.receive(0.4) is None
        friend = Link.connect(here.address)
        ends.callback(friend.close)
        friend.send(Stop(run_id="mine"))
        assert here.receive(5.0) == Stop(run_id="mine")
        here.send(Stop(run_id="yours"))
        assert friend.receive(5.0) == Stop(run_id="yours")
        assert stranger.receive(0.1) is None

    def test_each_link_has_an_address_and_keys_of_its_own(self, ends: ExitStack) -> None:
        links = [Link.listen(tcp_host="127.0.0.1") for _ in range(3)] + [Link.listen() for _ in range(3)]
        for link in links:
            ends.callback(link.close)
        assert len({link.address.endpoint for link in links}) == 6
        assert len({link.address.server_key for link in links if link.address.server_key}) == 3
