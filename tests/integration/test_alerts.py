"""Alerts of real runs, and their delivery by real commands and a local webhook."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dashboard.crash_watch import CrashWatch
from dashboard.run_list import RunList
from stepscope.alerts import monitor, sender
from stepscope.alerts.monitor import MARKER
from stepscope.alerts.sender import Alert, AlertSender
from stepscope.alerts.settings import (
    AlertLevel,
    AlertSettings,
    AlertState,
    CommandChannel,
    WebhookChannel,
)
from stepscope.run import RunKind, RunStatus, read_run
from stepscope.session.session import Session
from stepscope.store import StoreReader
from tests.support.child_process import run_python
from tests.support.run_folders import killed_run
from tests.support.run_values import alerts, steps_of
from tests.support.server import running
from tests.support.waiting import wait_until
from trainer.config import NanPolicy, Optimizer, Workload, defaults
from trainer.runners.training_run import run

ALERT = Alert(
    rule="hot",
    level=AlertLevel.WARNING,
    state=AlertState.RAISED,
    text="It is hot",
    value=91.5,
    metric="gpu/temp",
    device=None,
    run="r",
    name="n",
    folder="/f",
    host="h",
    rank=0,
    step=3,
    ts=1.0,
)
NOTES = """import json, os, sys
alert = json.load(sys.stdin)
alert["from_environment"] = os.environ["STEPSCOPE_ALERT_RULE"]
with open(sys.argv[1], "a") as file:
    file.write(json.dumps(alert) + "\\n")
"""
"""A command that appends the alert to a file."""


def said(folder: Path) -> list[tuple[str, str, str]]:
    return [
        (event.data["rule"], event.data["state"], event.data["level"]) for event in alerts(folder)
    ]


@dataclass(frozen=True)
class File:
    """An alerts.toml of the test, and the lines that its command has appended."""

    path: Path
    noted: Path

    @property
    def argv(self) -> tuple[str, ...]:
        return sys.executable, str(self.path.with_name("notes.py")), str(self.noted)

    def write(self, text: str = "", *, command: bool = True) -> None:
        self.path.write_text(f"[command]\nargv = {json.dumps(self.argv)}\n" * command + text)

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.noted.read_text().splitlines()]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[File]:
    folder = tmp_path / "config"
    folder.mkdir()
    path = folder / "alerts.toml"
    path.touch(0o600)
    (folder / "notes.py").write_text(NOTES)
    (folder / "noted").touch()
    monkeypatch.setenv("STEPSCOPE_ALERTS", str(path))
    yield File(path, folder / "noted")
    sender._finish()


def test_a_nan_loss_alerts_once_and_runs_the_command(tmp_path: Path, file: File) -> None:
    file.write()
    folder = tmp_path / "run"
    folder.mkdir()
    config = replace(
        defaults(Workload.LINEAR),
        epochs=60,
        learning_rate=100.0,
        optimizer=Optimizer.SGD,
        nan_policy=NanPolicy.CONTINUE,
    )
    assert run(config, folder) is RunStatus.FINISHED
    wait_until(lambda: len(file.lines()) >= 2)
    keys = sorted(event.text.partition(" ")[0] for event in alerts(folder))
    assert keys == ["train/loss", "val/loss"]
    assert said(folder) == [("loss_not_finite", "raised", "critical")] * 2
    alert = file.lines()[0]
    assert alert["value"] in ("NaN", "Infinity")
    assert alert["rule"] == alert["from_environment"] == "loss_not_finite"
    assert (alert["run"], alert["folder"]) == ("run", str(folder))


def test_the_end_of_a_run_alerts_by_its_status(tmp_path: Path, file: File) -> None:
    file.write("[rules.run_finished]\nenabled = true\n")
    for status in (RunStatus.FAILED, RunStatus.FINISHED, RunStatus.STOPPED):
        (tmp_path / status).mkdir()
        session = Session(tmp_path / status, name="x", kind=RunKind.INIT)
        for _ in range(2):
            session.close(status, "It broke.")
    wait_until(lambda: len(file.lines()) == 2)
    (failed,) = alerts(tmp_path / "failed")
    assert failed.text.endswith("It broke.")
    assert said(tmp_path / "failed") == [("run_failed", "raised", "critical")]
    assert said(tmp_path / "finished") == [("run_finished", "raised", "info")]
    assert said(tmp_path / "stopped") == []


def test_an_invalid_file_is_reported_in_the_run_without_its_secret(
    tmp_path: Path, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    file.write('[webhook]\nurl = "gopher://x/T0KEN"\n', command=False)
    session = Session(tmp_path, name="x", kind=RunKind.INIT)
    session.close(RunStatus.FINISHED)
    with StoreReader(tmp_path) as reader:
        (event,) = reader.events()
    assert event.kind == "alerts_problem"
    assert "url must begin" in event.text
    assert "url must begin" in caplog.text
    assert not any(b"T0KEN" in written.read_bytes() for written in tmp_path.glob("r*"))


def test_an_internal_error_ends_the_alerts_and_not_the_recording(
    tmp_path: Path, file: File, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file.write(command=False)
    session = Session(tmp_path, name="x", kind=RunKind.INIT)
    monkeypatch.setattr(monitor, "holds", None)
    session.recorder.log(1, {"train/loss": 1.0})
    wait_until(lambda: bool(caplog.records))
    session.recorder.log(2, {"train/loss": 1.0})
    session.close(RunStatus.FAILED, "It broke.")
    assert len(caplog.records) == 1
    assert said(tmp_path) == []
    assert read_run(tmp_path).run_json["step"] == 2


def deliver(settings: AlertSettings, count: int = 1) -> None:
    """Deliver an alert `count` times, and wait for it."""
    found = AlertSender()
    for _ in range(count):
        found.deliver(ALERT, settings)
    found.finish(20)
    assert not found.is_alive


def command(*words: str) -> AlertSettings:
    return AlertSettings(command=CommandChannel(argv=words))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["/no/such/program"], os.strerror(errno.ENOENT)),
        ([sys.executable, "-c", "print('why not'); raise SystemExit(3)"], "exit code 3"),
    ],
)
def test_a_command_that_fails_is_logged(
    words: list[str], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    deliver(command(*words))
    (record,) = caplog.records
    assert problem in record.message


def test_a_timeout_kills_a_command_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import subprocess, sys, time;"
        "p = subprocess.Popen(['sleep', '60']);"
        "open(sys.argv[1], 'w').write(str(p.pid)); time.sleep(60)"
    )
    file = tmp_path / "pid"
    monkeypatch.setattr(sender, "COMMAND_TIMEOUT_S", 2.0)
    deliver(command(sys.executable, "-c", code, str(file)))
    assert "within 2 s" in caplog.text
    process = Path(f"/proc/{file.read_text()}/cmdline")
    wait_until(lambda: not process.exists() or not process.read_bytes())


FAILS = """
import sys, stepscope
with stepscope.init("x", runs=sys.argv[1], sample=False) as rec:
    rec.step(loss=1.0)
    raise ValueError("no")
"""


def test_the_exit_waits_some_seconds_for_a_delivery(tmp_path: Path, file: File) -> None:
    """A slower command outlives the process, and may still print."""
    file.write()
    (tmp_path / "train.py").write_text(FAILS)
    run_python("train.py", str(tmp_path / "runs"), cwd=tmp_path)
    (line,) = file.lines()
    assert line["rule"] == "run_failed"
    assert str(line["text"]).endswith("ValueError: no")
    done = tmp_path / "done"
    code = "import time; time.sleep(4); print('x' * 100_000, flush=True); open('done', 'w')"
    argv = json.dumps([sys.executable, "-c", code])
    file.write(f"[command]\nargv = {argv}\n", command=False)
    run_python("train.py", str(tmp_path / "runs"), cwd=tmp_path)
    assert not done.exists()
    wait_until(done.exists, 20)


@dataclass
class Receiver:
    """A local server: answers with the next of `codes` (200 at last) after `delay_s`."""

    codes: list[int] = field(default_factory=list)
    delay_s: float = 0.0
    location: str = ""
    got: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    url: str = ""

    def settings(self) -> AlertSettings:
        return AlertSettings(webhook=WebhookChannel(url=f"{self.url}/T0KEN"))


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.got.append((self.path, json.loads(body)))
            time.sleep(found.delay_s)
            self.send_response(found.codes.pop(0) if found.codes else 200)
            if found.location:
                self.send_header("Location", found.location)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(sender, "PAUSES_S", (0.0, 0.05, 0.05))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with running(server) as found.url:
        yield found


def test_a_webhook_that_does_not_answer_delays_later_alerts_only(
    file: File, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.delay_s = 2.0
    settings = msgspec.structs.replace(receiver.settings(), command=CommandChannel(argv=file.argv))
    found = AlertSender()
    found.deliver(ALERT, settings)
    wait_until(lambda: len(file.lines()) == 1, 20)
    found.finish(0.0)
    assert "could not be delivered within 0 s" in caplog.text
    wait_until(lambda: not found.is_alive, 20)
    assert receiver.got == [("/T0KEN", msgspec.to_builtins(ALERT))]


@pytest.mark.parametrize(
    ("codes", "delay_s", "requests", "problem"),
    [
        ([503, 500], 0, 3, None),
        ([500] * 3, 0, 3, "it answered 500"),
        ([404], 0, 1, "it answered 404"),
        ([302], 0, 1, "it answered 302"),
        ([308], 0, 1, "it answered 308"),
        ([], 1.0, 3, "no answer"),
        (None, 0, 0, os.strerror(errno.ECONNREFUSED)),
    ],
)
def test_a_temporary_problem_is_retried_and_a_redirect_is_not_followed(
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    codes: list[int] | None,
    delay_s: float,
    requests: int,
    problem: str | None,
) -> None:
    if codes is None:
        receiver.url = "http://127.0.0.1:9"
    receiver.codes, receiver.delay_s = list(codes or ()), delay_s
    receiver.location = f"{receiver.url}/elsewhere"
    monkeypatch.setattr(sender, "WEBHOOK_TIMEOUT_S", 0.2 if delay_s else 5.0)
    deliver(receiver.settings())
    assert [path for path, _ in receiver.got] == ["/T0KEN"] * requests
    assert caplog.text.count("failed") == (problem is not None)
    assert (problem or "") in caplog.text
    assert ("http://127.0.0.1/…" in caplog.text) == (problem is not None)
    assert "T0KEN" not in caplog.text


def test_the_server_reports_a_killed_run_once(tmp_path: Path, file: File) -> None:
    file.write('[rules.run_failed]\ntext = "At {step}: {value}"\n')
    folder = tmp_path / "runs" / "killed"
    folder.mkdir(parents=True)
    killed_run(folder, lines=40)
    watch = CrashWatch(RunList(folder.parent))
    wait_until(lambda: watch.check_runs() == [folder.name])
    (event,) = alerts(folder)
    assert event.data["rule"] == "run_failed"
    assert event.text.startswith(f"At {event.step}: ")
    assert steps_of(folder) >= event.step  # the process's last rows are stored, before it
    wait_until(lambda: len(file.lines()) == 1)
    # Neither another look nor another server reports it again.
    assert watch.check_runs() == []
    assert CrashWatch(RunList(folder.parent)).check_runs() == []
    assert len(alerts(folder)) == 1
    assert file.lines()[0]["run"] == folder.name


def test_an_old_a_foreign_and_a_disabled_crash_is_not_reported(tmp_path: Path, file: File) -> None:
    folder = tmp_path / "runs" / "killed"
    folder.mkdir(parents=True)
    killed_run(folder, lines=40)
    wait_until(lambda: read_run(folder).status is RunStatus.CRASHED)
    path = folder / "run.json"
    original = path.read_text()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("", {"heartbeat": time.time() - 3600}),
        ("", {"host": "elsewhere", "heartbeat": time.time() - 60}),
        ("", {"user": "somebody"}),
        ("[rules.run_failed]\nenabled = false\n", {}),
    ]
    for text, change in cases:
        file.write(text)
        run_json = json.loads(original) | change
        path.write_text(json.dumps(run_json))
        os.utime(path, (run_json["heartbeat"],) * 2)
        assert CrashWatch(RunList(folder.parent)).check_runs() == []
        assert not (folder / MARKER).exists()
    file.write("")
    path.write_text(original)
    os.utime(path)
    assert CrashWatch(RunList(folder.parent)).check_runs() == [folder.name]
