"""NCCL's RAS: answers as NVIDIA documents them, hostile ones, and a server that gives them.

The samples are those of NCCL's user guide (docs/userguide/source/troubleshooting/ras.rst), the
counts by type those that `src/ras/client_support.cc` prints since 2.26.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.diagnosis.ras import RasReport, behind, parse
from stepscope.sampling import nccl_ras

JSON = """{
  "nccl_version": "2.29.1",
  "cuda_runtime_version": 13000,
  "cuda_driver_version": 13000,
  "timestamp": "2025-12-19 13:06:53",
  "communicators_count": 1,
  "communicators": [
    {
      "hash": "0xae94423cfbb2ef4a",
      "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
      "size": 2,
      "ranks_count": 1,
      "missing_ranks_count": 1,
      "ranks": [
        {
          "rank": 0, "host": "172.16.64.245", "pid": 1524344, "cuda_dev": 0, "nvml_dev": 0,
          "status": {"init_state": 0, "async_error": 0, "finalize_called": false,
                     "destroy_flag": false, "abort_flag": false},
          "collective_counts": {"Broadcast": 0, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0,
                                "AllReduce": 12}
        }
      ],
      "missing_ranks": [
        {"rank": 1, "host": "172.16.64.245", "pid": 1524345, "cuda_dev": 1, "nvml_dev": 1,
         "status": {"unresponsive": true, "considered_dead": false}}
      ]
    }
  ],
  "ras": {"collection_time_sec": 2.000, "timeouts_count": 1}
}
"""
HEAD = """NCCL version 2.26.2 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH

"""
COUNTS = """Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  29 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
  Rank 5 has not launched any operations -- GPU 5 managed by process 483077 on node 172.16.64.210

"""
STOPPED = """Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data
"""
DEAD = """Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 21 -- GPU 5 managed by process 3487984 on node 172.16.64.213
"""


def test_json_names_the_missing_rank_and_the_counts() -> None:
    report = parse(JSON)
    [missing] = report.missing
    assert (missing.rank, missing.pid, missing.dead) == (1, 1524345, False)
    assert (report.version, report.timeouts) == ("2.29.1", 1)
    [communicator] = report.communicators
    assert communicator.size == 2
    assert communicator.ranks[0].counts["AllReduce"] == 12


def test_text_names_the_ranks_that_are_behind() -> None:
    report = parse(HEAD + COUNTS)
    assert report.version == "2.26.2"
    [communicator] = report.communicators
    found = {rank.rank: (rank.pid, rank.counts) for rank in communicator.ranks}
    assert found == {
        0: (483072, {"AllReduce": 6649}),
        2: (483074, {"AllReduce": 6649}),
        5: (483077, {"AllReduce": 0}),
    }
    late = [(rank.rank, rank.counts[kind], most) for _, rank, kind, most in behind(report)]
    assert late == [(5, 0, 6649)], "the count of those that it does not name is not known"


def test_text_names_missing_and_dead_processes() -> None:
    report = parse(HEAD + STOPPED)
    assert report.timeouts == 2
    assert {(rank.rank, rank.pid) for rank in report.missing} == {(21, None), (-1, 3487984)}
    dead = parse(HEAD + DEAD)
    assert any(rank.dead for rank in dead.missing)
    assert 21 in {rank.rank for one in dead.communicators for rank in one.ranks}


@pytest.mark.parametrize(
    "text",
    ["", "HTTP/1.1 400 Bad Request\r\n", "{", '{"communicators": 3}', "[" * 99_999, "\0" * 9],
)
def test_what_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse(text)


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(("rank", "ranks", "missing_ranks", "pid", "status", "collective_counts",
                         "size", "hash", "AllReduce")), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


@given(st.lists(JSONS, max_size=3), JSONS)
def test_any_json_is_read_or_refused(communicators: list[object], ras: object) -> None:
    told = {"nccl_version": ras, "communicators": communicators, "ras": ras}
    report = parse(json.dumps(told))
    assert isinstance(report, RasReport)
    behind(report)
    assert len(report.missing) < 100


@given(st.lists(st.sampled_from((HEAD + COUNTS + STOPPED + DEAD).splitlines()) | st.text()))
def test_any_text_is_read(lines: list[str]) -> None:
    report = parse("Job summary\n" + "\n".join(lines))
    behind(report)


@contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Serve one connection on localhost."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def work() -> None:
            connection, _ = listening.accept()
            with connection:
                serve(connection)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            host, port = listening.getsockname()[:2]
            yield host, port
        finally:
            thread.join(10)
    assert not thread.is_alive()


def as_nccl(connection: socket.socket, *, knows_json: bool = True) -> None:
    """Answer as `rasClientEventLoop` of NCCL does."""
    with connection.makefile("rwb") as file:
        wants_json = False
        for line in file:
            command = line.decode().strip().lower()
            if command.startswith("client protocol "):
                file.write(b"SERVER PROTOCOL 2\n")
            elif command.startswith("timeout "):
                file.write(b"OK\n")
            elif command == "set format json" and knows_json:
                wants_json = True
                file.write(b"OK\n")
            elif command == "verbose status":
                file.write((JSON if wants_json else HEAD + COUNTS).encode())
                return
            else:
                file.write(f"ERROR: Unknown command {command}\n".encode())
            file.flush()


def test_a_server_of_today_answers_json_and_an_older_one_text() -> None:
    with server(as_nccl) as where:
        assert parse(nccl_ras.ask(where)).version == "2.29.1"
    with server(lambda connection: as_nccl(connection, knows_json=False)) as where:
        assert parse(nccl_ras.ask(where)).version == "2.26.2"


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()[:2]
    with pytest.raises(nccl_ras.RasError, match="no connection"):
        nccl_ras.ask((host, port))


def test_another_program_answers() -> None:
    def web(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with server(web) as where, pytest.raises(nccl_ras.RasError, match="another program"):
        nccl_ras.ask(where)


@pytest.mark.parametrize("what", ["nothing", "no end", "no line"])
def test_a_hostile_server_takes_no_more_than_the_time(what: str) -> None:
    def flood(connection: socket.socket) -> None:
        try:
            if what == "no end":
                connection.recv(100)
                connection.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n")
            while connection.recv(1) if what == "nothing" else True:
                if what != "nothing":
                    connection.sendall(b"x" * 65536)
        except OSError:
            return  # it hung up

    begun = time.monotonic()
    with server(flood) as where, pytest.raises(nccl_ras.RasError):
        nccl_ras.ask(where, timeout_s=0.5)
    assert time.monotonic() - begun < 5


def test_where_it_listens() -> None:
    assert nccl_ras.address({}) == ("localhost", 28028)
    assert nccl_ras.address({"NCCL_RAS_ADDR": "[::1]:4000"}) == ("::1", 4000)
    assert nccl_ras.address({"NCCL_RAS_ENABLE": "0"}) is None
    assert nccl_ras.address({"NCCL_RAS_ADDR": "nonsense"}) is None
