"""Runs of another host: a real ssh server on the loopback address, and a host that lies."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope.remote import far_reader
from stepscope.remote.access import read_only_reason
from stepscope.remote.source import RemoteSource, SshAddress
from stepscope.run import RunStatus, read_run
from stepscope.store import STORE_NAME, StoreReader
from stepscope.store.reader import EVERY, send_command
from tests.support.recorded_runs import write_run
from tests.support.server import ROOT
from tests.support.sshd import SSHD, delayed, ssh_server
from tests.support.waiting import wait_for, wait_until

LIVE = """
import os, sys, time
import stepscope
run = stepscope.init(runs=sys.argv[1], name="far", config={"rate": 0.1})
print(run.folder.name, flush=True)
step = 0
while not os.path.exists(sys.argv[2]):
    step += 1
    run.step(loss=1 / step)
    time.sleep(0.005)
run.close()
"""
Start = Callable[..., RemoteSource]


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if SSHD is None:
        pytest.skip("no sshd: install openssh-server")
    with ssh_server(tmp_path_factory.mktemp("ssh") / "server") as command:
        yield command


@pytest.fixture
def start(ssh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A function that starts a source of the folder "far"."""
    monkeypatch.setenv("STEPSCOPE_SSH", ssh)
    (tmp_path / "far").mkdir()
    made: list[RemoteSource] = []

    def started(**changes: Any) -> RemoteSource:
        address = SshAddress(**{"host": "far", "path": str(tmp_path / "far")} | changes)
        made.append(RemoteSource(address, tmp_path / "mirror"))
        made[-1].start()
        return made[-1]

    yield started
    for source in made:
        source.close()
        assert not source._thread.is_alive()


@contextmanager
def live_run(tmp_path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the id of a run that makes 200 steps a second, and the function that ends it."""
    end = tmp_path / "end"
    command = [sys.executable, "-c", LIVE, str(tmp_path / "far"), str(end)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None

        def finish() -> None:
            end.touch()
            assert child.wait(30) == 0

        try:
            yield child.stdout.readline().strip(), finish
        finally:
            child.kill()


def content(folder: Path) -> dict[str, Any]:
    """Return the rows and the events of a store."""
    with StoreReader(folder) as reader:
        series = {
            (one.stream, one.source): reader.read(one.id, 0, one.rows, 1) for one in reader.series()
        }
        events = [(event.ts, event.kind, event.text) for event in reader.events(limit=EVERY)]
    return {
        "rows": {
            key: (block.keys, block.ts.tolist(), block.step.tolist())
            for key, block in series.items()
        },
        "events": events,
    }


def steps(folder: Path) -> int:
    found = content(folder)["rows"].get(("steps", ""))
    return 0 if found is None else len(found[1])


def port_of(ssh: str) -> str:
    """Return the port of the ssh server."""
    return Path(ssh.split()[-1]).read_text().split("Port ")[1].split()[0]


def programs(ssh: str) -> list[int]:
    """Return the processes that run on the far side of this ssh server."""
    found = []
    for one in psutil.process_iter(["cmdline", "environ"]):
        connection = (one.info["environ"] or {}).get("SSH_CONNECTION", "")
        is_program = (one.info["cmdline"] or [])[1:2] == ["-uc"]
        if is_program and connection.endswith(f" {port_of(ssh)}"):
            found.append(one.pid)
    return found


def test_a_live_run_is_mirrored_its_buttons_work_and_a_lost_connection_leaves_no_gap(
    ssh: str, start: Start, tmp_path: Path
) -> None:
    with live_run(tmp_path) as (run_id, finish):
        source = start()
        near, far = tmp_path / "mirror" / run_id, tmp_path / "far" / run_id
        wait_for(lambda: (near / STORE_NAME).exists() and steps(near) > 50)
        run = read_run(near)
        assert run.status is RunStatus.RUNNING
        assert read_only_reason(run) is None
        assert source.state().delay_s is not None

        send_command(near, "mark", {"text": "elsewhere"})
        wait_for(lambda: "elsewhere" in str(content(near)["events"]))

        before, (program,) = steps(near), programs(ssh)
        assert source._process is not None
        source._process.send_signal(signal.SIGKILL)
        wait_until(lambda: not source.state().connected)
        assert read_run(near).status is RunStatus.RUNNING
        wait_until(lambda: source.state().connected)
        wait_for(lambda: steps(near) > before)
        wait_until(lambda: not psutil.pid_exists(program))
        finish()
        wait_for(lambda: read_run(near).status is RunStatus.FINISHED)
        wait_for(lambda: content(near) == content(far))
        marks = [event for event in content(far)["events"] if "elsewhere" in event[2]]
        assert len(marks) == 1


def test_a_command_sent_without_a_connection_is_refused_and_never_delivered(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live_run(tmp_path) as (run_id, _):
        source = start()
        near, far = tmp_path / "mirror" / run_id, tmp_path / "far" / run_id
        wait_for(lambda: steps(near) > 10)
        source.close()
        contact = tmp_path / "mirror" / ".connected"
        os.utime(contact, (time.time() - 20, time.time() - 20))
        assert "Not connected" in str(read_only_reason(read_run(near)))
        send_command(near, "mark", {"text": "too late"})
        monkeypatch.setattr("stepscope.remote.mirror.UNDELIVERED_S", 0.0)
        start()
        known = steps(near)
        wait_for(lambda: steps(near) > known + 100)
        assert "too late" not in str(content(far)["events"])


def test_the_program_runs_with_python_3_6_and_slow_lines(
    ssh: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 ms in each direction; where a Python 3.6 is installed, by that one."""
    write_run(tmp_path / "far" / "old", steps=[(0.1 * n, n, {"train/loss": n}) for n in range(900)])
    old = next(Path.home().glob(".pyenv/versions/3.6.*/bin"), None)
    config = Path(ssh.split()[-1])
    if old is not None:
        server = config.with_name("sshd_config")
        assert "SetEnv" not in server.read_text()
        monkeypatch.setenv("STEPSCOPE_SSH", f"{ROOT}/tests/scripts/ssh_with_path {old} {ssh}")
    with delayed(int(port_of(ssh)), 0.2) as slow:
        source = start(port=slow)
        wait_until(lambda: source.state().connected)
        source.want("old")
        near = tmp_path / "mirror" / "old"
        wait_for(lambda: content(near) == content(tmp_path / "far" / "old"))
        assert (source.state().delay_s or 0) >= 0.4


def test_an_unreachable_host_is_named_with_the_message_of_ssh(start: Start) -> None:
    source = start(port=1)
    text = wait_for(lambda: source.state().text)
    assert "Connection refused" in text
    assert 0 < (source.state().retry_in_s or 0) <= 30
    source.close()
    source = start(path="/nowhere")
    assert "/nowhere" in wait_for(lambda: source.state().text)


def frame(value: Any) -> bytes:
    data = zlib.compress(value if isinstance(value, bytes) else json.dumps(value).encode())
    return struct.pack(">I", len(data)) + data


def whole(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "offset": None, "data": "e30=", "signature": [1, 2, None]} | changes


GOOD = {"runs": [], "listed": {}, "follow": {}, "commands": [], "more": False}
LIES = {
    "a huge frame": b"\xff\xff\xff\xff",
    "a bomb": frame(b" " * (70 * 2**20)),
    "no deflate": struct.pack(">I", 4) + b"abcd",
    "no JSON": frame(b"{"),
    "deep JSON": frame(b"[" * 100_000),
    "another type": frame({"runs": 3}),
    "a parent folder": frame({**GOOD, "listed": {"../out": whole("run.json")}}),
    "an absolute file": frame({**GOOD, "follow": {"r": {"files": [whole("/tmp/out.json")]}}}),
    "a hidden file": frame({**GOOD, "follow": {"r": {"files": [whole(".bashrc.txt")]}}}),
    "a program": frame({**GOOD, "follow": {"r": {"files": [whole("x.py")]}}}),
    "a gap": frame({**GOOD, "follow": {"r": {"files": [whole("o.log", offset=9**9)]}}}),
    "a store elsewhere": frame(
        {**GOOD, "follow": {"r": {"stores": {"0/../../out": {"version": 3}}}}}
    ),
    "no metadata": frame({**GOOD, "listed": {"r": whole("run.json", data="WzFd")}}),
    "a run that was not requested": frame({**GOOD, "follow": {"q": {"files": [whole("x.json")]}}}),
    "a row of other types": frame(
        {**GOOD, "follow": {"r": {"stores": {"0": {"version": 3, "events": [["a"]]}}}}}
    ),
    "an age without end": frame(
        {
            **GOOD,
            "runs": ["r"],
            "listed": {
                "r": whole(
                    "run.json", facts={"live": True, "age_s": 1e300, "alive": None, "reason": None}
                )
            },
        }
    ),
    "a foreign command": frame({**GOOD, "commands": [["../out", 1, None]]}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_host_that_lies_changes_nothing_outside_of_its_mirror(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answers").write_bytes(far_reader.MAGIC + LIES[lie])
    liar = tmp_path / "liar"
    liar.write_text(f"#!/bin/sh\ncat {tmp_path}/answers\nexec sleep 60\n")
    liar.chmod(0o755)
    monkeypatch.setenv("STEPSCOPE_SSH", str(liar))
    monkeypatch.setattr("stepscope.remote.source.SILENCE_S", 0.3)
    monkeypatch.setattr("stepscope.remote.source.IDLE_POLL_S", 0.01)
    before = sorted(tmp_path.iterdir())
    source = RemoteSource(SshAddress("h", "/r"), tmp_path / "mirror")
    source.want("r")
    source.start()
    try:
        wait_for(lambda: source.state().text)  # the state after the lie, or after no answer
        assert source._thread.is_alive()
    finally:
        source.close()
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "mirror"])
    names = {path.name for path in (tmp_path / "mirror").rglob("*") if path.is_file()}
    assert names <= {".connected", ".lock", "o.log"}
    assert sum(path.stat().st_size for path in (tmp_path / "mirror").rglob("*.log")) == 0
