"""What the machine can start is asked before anything is started."""

import socket
import sys

import pytest

from shardwise.cli import machine
from shardwise.cli.machine import RANK_BYTES, available_memory_bytes, check_port, check_ranks
from shardwise.core.errors import UsageError


def test_a_few_ranks_are_fine() -> None:
    check_ranks(1)
    check_ranks(2)


def test_more_ranks_than_memory_are_refused_with_the_number_that_fits() -> None:
    too_many = available_memory_bytes() // RANK_BYTES * 2 + 2
    with pytest.raises(UsageError, match=rf"Asked for {too_many} ranks, but this machine can start about \d+: .*--ranks"):
        check_ranks(too_many)


def test_limit_of_processes_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (64, 64))
    with pytest.raises(UsageError, match=r"can start about 4: it allows 64 processes and threads"):
        check_ranks(5)
    check_ranks(4)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_available_memory_is_no_more_than_there_is() -> None:
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < available_memory_bytes() <= total


def test_port_in_use_is_refused_and_any_free_one_is_fine() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"Port {port} is in use by another program.*--port"):
            check_port(port)
    check_port(port)
    check_port(0)
