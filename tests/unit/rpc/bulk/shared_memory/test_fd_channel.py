"""Records and the descriptors that come with them."""

from __future__ import annotations

import array
import os
import pwd
import socket
from collections.abc import Iterator

import pytest

from rpc.bulk.shared_memory import fd_channel
from rpc.bulk.shared_memory.memory import create
from tests.unit.rpc.bulk.shared_memory.ends import in_child, open_descriptors

Channel = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Channel]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in pair:
        each.setblocking(False)
    yield pair
    for each in pair:
        each.close()


@pytest.mark.parametrize("count", [0, 2, 3, 100])
def test_any_other_number_of_descriptors_is_none_and_leaves_none_open(ends: Channel, count: int) -> None:
    rights = array.array("i", [ends[0].fileno()] * count)
    before = open_descriptors()
    ends[0].sendmsg([b"record"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if count else [])
    assert fd_channel.receive(ends[1]) == (b"record", None)
    assert open_descriptors() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to become another user")
def test_another_users_process_is_turned_away() -> None:
    listener, name = fd_channel.listen()
    nobody = pwd.getpwnam("nobody").pw_uid

    def stranger() -> None:
        os.setuid(nobody)
        with pytest.raises(PermissionError, match="a process of another user"):
            fd_channel.connect(name)

    in_child(stranger)
    assert fd_channel.accept(listener) is None
    listener.close()


def test_a_record_brings_a_descriptor(ends: Channel) -> None:
    descriptor = create(4096)
    fd_channel.send(ends[0], b"record", descriptor)
    record, arrived = fd_channel.receive(ends[1])
    assert record == b"record"
    assert arrived is not None
    assert os.path.sameopenfile(arrived, descriptor)
    assert not os.get_inheritable(arrived)
    os.close(arrived)
    os.close(descriptor)
