"""The protocol of a process manager, and the messages if it does not answer."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from bigtrain.errors import LaunchError
from bigtrain.ranks.pmi import share_value, shared_by_hydra

ANSWERS = {
    "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_1",
    "put": "cmd=put_result rc=0 msg=success",
    "barrier_in": "cmd=barrier_out",
    "get": "cmd=get_result rc=0 msg=success value=10.0.0.7:4321",
    "finalize": "cmd=finalize_ack",
}


def manager(server: socket.socket, answers: dict[str, str]) -> list[str]:
    requests = []
    with server, server.makefile("rw") as lines:
        for line in lines:
            requests.append(line.strip())
            command = line.split()[0].partition("=")[2]
            if command not in answers:
                return requests
            lines.write(answers[command] + "\n")
            lines.flush()
    return requests


def share_address(value: str | None, answers: dict[str, str]) -> tuple[str, list[str]]:
    """Share an address through a manager; return it and the manager's requests."""
    mine, theirs = socket.socketpair()
    with ThreadPoolExecutor() as pool, mine:
        serving = pool.submit(manager, theirs, answers)
        address = share_value(value, {"PMI_FD": str(mine.fileno())})
        mine.close()
        return address, serving.result(5)


def test_rank_0_puts_and_the_others_get() -> None:
    address, requests = share_address("10.0.0.7:4321", ANSWERS)
    assert address == "10.0.0.7:4321"
    assert "cmd=put kvsname=kvs_1 key=bigtrain-rank-0 value=10.0.0.7:4321" in requests
    address, requests = share_address(None, ANSWERS)
    assert address == "10.0.0.7:4321"
    assert not any(line.startswith("cmd=put") for line in requests)


@pytest.mark.parametrize(
    "answers",
    [{}, {**ANSWERS, "get": "cmd=get_result rc=-1 msg=key_not_found"}, {**ANSWERS, "get": "junk"}],
)
def test_a_manager_that_does_not_answer_is_told_of(answers: dict[str, str]) -> None:
    with pytest.raises(
        LaunchError, match="does not share the address of rank 0: .*-genv MASTER_ADDR HOST"
    ):
        share_address(None, answers)


def test_a_connection_that_is_none() -> None:
    assert not shared_by_hydra({})
    assert not shared_by_hydra({"PMI_FD": "-1"})
    assert shared_by_hydra({"PMI_FD": "987654"})
    with pytest.raises(LaunchError, match="Bad file descriptor"):
        share_value(None, {"PMI_FD": "987654"})
