"""Runs of another host: a real ssh server on the loopback address, and a host that lies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope.host.child_process import free_port, wait_until_it_listens
from stepscope.remote import far_reader
from stepscope.remote.access import read_only_reason
from stepscope.remote.source import RemoteSource
from stepscope.run import RunStatus, read_run
from stepscope.store import STORE_NAME, StoreReader
from stepscope.store.reader import EVERY, send_command
from tests.support.server import ROOT
from tests.support.waiting import wait_for, wait_until

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


@contextmanager
def ssh_server(folder: Path) -> Iterator[str]:
    """Yield the ssh command that reaches the server as the host "far"."""
    assert SSHD is not None, "sshd: install openssh-server"
    folder.mkdir(parents=True)
    for key in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    port = free_port()
    assert port is not None
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin yes\n"
    )
    (folder / "config").write_text(
        f"Host far\nHostName 127.0.0.1\nPort {port}\nIdentityFile {folder}/user_key\n"
        f"IdentitiesOnly yes\nUserKnownHostsFile {folder}/known\nStrictHostKeyChecking no\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with open(folder / "sshd.log", "wb") as log:
        server = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log, stdout=log
        )
    try:
        assert wait_until_it_listens(server.pid, port)
        yield f"ssh -F {folder / 'config'}"
    finally:
        server.kill()
        server.wait()


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "far").mkdir()
    made: list[RemoteSource] = []

    def started(host: str = "far", path: str = f"{tmp_path}/far") -> RemoteSource:
        made.append(RemoteSource(f"ssh://{host}{path}"))
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
        near, far = source.folder / run_id, tmp_path / "far" / run_id
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
        near, far = source.folder / run_id, tmp_path / "far" / run_id
        wait_for(lambda: steps(near) > 10)
        source.close()
        contact = source.folder / ".connected"
        os.utime(contact, (time.time() - 20, time.time() - 20))
        assert "Not connected" in str(read_only_reason(read_run(near)))
        send_command(near, "mark", {"text": "too late"})
        monkeypatch.setattr("stepscope.remote.mirror.UNDELIVERED_S", 0.0)
        start()
        known = steps(near)
        wait_for(lambda: steps(near) > known + 100)
        assert "too late" not in str(content(far)["events"])


def test_an_unreachable_host_is_named_with_the_message_of_ssh(start: Start) -> None:
    source = start("far:1")
    text = wait_for(lambda: source.state().text)
    assert "Connection refused" in text
    assert 0 < (source.state().retry_at or 0) - time.monotonic() <= 30
    source.close()
    source = start(path="/nowhere")
    assert "/nowhere" in wait_for(lambda: source.state().text)


def answer(**changes: Any) -> bytes:
    """Return a line of a host that lists the run "r"."""
    found = {run: json.dumps(new) for run, new in changes.pop("found", {}).items()}
    good = {"runs": ["r"], "found": found, "commands": [], "more": False}
    return json.dumps(good | changes).encode() + b"\n"


def whole(name: str, **changes: Any) -> bytes:
    return answer(found={"r": {"files": [{"name": name, "data": "e30="} | changes]}})


FACTS = {"live": True, "age_s": 1.0, "alive": None, "reason": None}
LIES = {
    "a line without end": b" " * (70 * 2**20),
    "no JSON": b"{\n",
    "deep JSON": b"[" * 100_000 + b"\n",
    "a parent folder": answer(runs=["../out"], found={"../out": {"files": []}}),
    "an absolute file": whole("/tmp/out.json"),
    "a program": whole("x.py"),
    "a store elsewhere": answer(found={"r": {"stores": {"0/../../out": {"version": 4}}}}),
    "a run that is not listed": answer(runs=[], found={"r": {"files": [{"name": "x.json"}]}}),
    "a row of other types": answer(
        found={"r": {"stores": {"rank0.sqlite": {"version": 4, "events": [["a"]]}}}}
    ),
    "an age without end": whole("run.json", facts=FACTS | {"age_s": 1e300}),
    "a foreign command": answer(commands=[["../out", 1, None]]),
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
    monkeypatch.setattr("stepscope.remote.source.ANSWER_S", 0.5)
    monkeypatch.setattr("stepscope.remote.source.IDLE_POLL_S", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = sorted(tmp_path.iterdir())
    source = RemoteSource("ssh://h/r")
    source.want("r")
    source.start()
    try:
        wait_for(lambda: source.state().text)  # the state after the lie, or after no answer
        assert source._thread.is_alive()
    finally:
        source.close()
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "cache"])
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {path.parent for path in files} <= {source.folder, source.folder / "r"}
    assert {path.name for path in files} <= {".connected", ".lock", "o.log"}
    assert sum(path.stat().st_size for path in files) == 0
