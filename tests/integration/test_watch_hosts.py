"""Two nodes of torchrun on one machine that believe to be two hosts, watched as one job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from stepscope.run import RunStatus, read_run, run_folders
from stepscope.run.rank_status import rank_states
from tests.support.run_values import steps_of
from tests.support.watched_scripts import SCRIPTS


def node(number: int, root: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the agent of one node, of one process, on its own made-up host."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "sweep", "--local-addr", "127.0.0.1"]
    place = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", "1"]
    return subprocess.Popen(
        [*agent, *rendezvous, *place, "-m", "stepscope.watch", "ranks.py"],
        cwd=SCRIPTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(SCRIPTS / "host_name"), os.environ.get("PYTHONPATH", "")]
            ),
            "OMP_NUM_THREADS": "1",
            "STEPSCOPE_RUNS": str(root),
            "STAND_IN_HOST": f"node{number}",
        },
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def two_nodes(roots: list[Path], port: int) -> None:
    agents = [node(0, roots[0], port), node(1, roots[1], port)]
    try:
        for agent in agents:
            output, _ = agent.communicate(timeout=100)
            assert agent.returncode == 0, output.decode()
    finally:
        for agent in agents:
            agent.kill()


def facts(folder: Path) -> list[dict[str, Any]]:
    files = [folder / "run.json", *sorted(folder.glob("rank*.json"))]
    return [json.loads(path.read_text()) for path in files]


def test_two_hosts_with_a_shared_disk_are_one_run(tmp_path: Path) -> None:
    two_nodes([tmp_path, tmp_path], free_port())
    [first] = run_folders(tmp_path)
    assert [steps_of(first, number) for number in (0, 1)] == [20, 20]
    found = facts(first)
    assert [one["rank"] for one in found] == [0, 1]
    assert {one["host"] for one in found} == {"node0", "node1"}
    assert [one["world_size"] for one in found] == [2, 2]
    assert read_run(first).status is RunStatus.FINISHED
    assert [standing.state.value for standing in rank_states(first)] == ["finished"] * 2
