"""Alerts of real runs, real commands, and a webhook that a real server takes, delays or refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from dashboard import crash_watch
from dashboard.crash_watch import CrashWatch
from dashboard.run_index import RunIndex
from stepscope.alerts import notifier
from stepscope.alerts.crash import MARKER
from stepscope.alerts.notifier import Alert, AlertNotifier
from stepscope.alerts.rules import AlertLevel, AlertState
from stepscope.alerts.settings import AlertSettings, CommandChannel, WebhookChannel
from stepscope.recorder.recorder import CommandName
from stepscope.run import RunKind, RunStatus, read_run, run_folders
from stepscope.session.session import Session
from stepscope.store import StoreReader
from stepscope.store.reader import send_command
from tests.support.killed_runs import killed
from tests.support.run_values import alerts
from tests.support.waiting import wait_until
from trainer.config import NanPolicy, Optimizer, Workload, defaults
from trainer.training.train import run

ROOT = Path(__file__).resolve().parents[2]
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
"""A command that notes what it is given."""


def said(folder: Path) -> list[tuple[str, str, str]]:
    return [
        (event.data["rule"], event.data["state"], event.data["level"]) for event in alerts(folder)
    ]


@dataclass(frozen=True)
class File:
    """An alerts.toml of the test, and the lines that its command has noted."""

    path: Path
    noted: Path

    def write(self, text: str = "", *, command: bool = True) -> None:
        words = json.dumps([sys.executable, str(self.path.with_name("notes.py")), str(self.noted)])
        own = f"[command]\nargv = {words}\n" if command else ""
        self.path.write_text(f"{own}{text}")

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.noted.read_text().splitlines()]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> File:
    folder = tmp_path / "config"
    folder.mkdir()
    path = folder / "alerts.toml"
    path.touch(0o600)
    (folder / "notes.py").write_text(NOTES)
    (folder / "noted").touch()
    monkeypatch.setenv("STEPSCOPE_ALERTS", str(path))
    return File(path, folder / "noted")


# --- runs ---


def test_a_run_whose_loss_becomes_nan_alerts_once_and_tells_the_command(
    tmp_path: Path, file: File
) -> None:
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
    found = alerts(folder)
    texts = [event.text.partition(" at step")[0] for event in found]
    assert len(texts) == len(set(texts)) == 2  # of the training and of the validation
    assert {text.partition(" ")[0] for text in texts} == {"train/loss", "val/loss"}
    assert said(folder) == [("loss_not_finite", "raised", "critical")] * 2
    alert = file.lines()[0]
    assert alert["value"] in ("NaN", "Infinity")
    assert alert["rule"] == alert["from_environment"] == "loss_not_finite"
    assert (alert["run"], alert["folder"]) == ("run", str(folder))


def test_a_run_that_fails_alerts_at_its_end_and_one_that_finishes_if_asked(
    tmp_path: Path, file: File
) -> None:
    file.write("[rules.run_finished]\nenabled = true\n")
    for name, status in (
        ("a", RunStatus.FAILED),
        ("b", RunStatus.FINISHED),
        ("c", RunStatus.STOPPED),
    ):
        (tmp_path / name).mkdir()
        session = Session(tmp_path / name, name=name, kind=RunKind.INIT)
        session.recorder.log(3, {"train/loss": 1.0})
        session.close(status, "It broke.")
        session.close(status, "It broke.")
    wait_until(lambda: len(file.lines()) == 2)
    (failed,) = alerts(tmp_path / "a")
    assert failed.text == "The run failed: It broke."
    assert said(tmp_path / "b") == [("run_finished", "raised", "info")]
    assert said(tmp_path / "c") == []


def test_a_rank_that_failed_because_another_had_says_nothing(tmp_path: Path, file: File) -> None:
    file.write()
    session = Session(tmp_path, name="x", kind=RunKind.INIT, rank=1)
    session.close(RunStatus.FAILED, "RuntimeError: Connection closed by peer [127.0.0.1]:3")
    with StoreReader(tmp_path, 1) as reader:
        assert [event.kind for event in reader.events()] == []


STALLED = """
import sys, time
import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
    if step == 45:
        time.sleep(4.5)
"""


def test_a_watched_script_that_stalls_alerts_and_its_next_step_clears_it(
    tmp_path: Path, file: File
) -> None:
    file.write("[rules.no_step]\nfor_s = 2\n")
    (tmp_path / "train.py").write_text(STALLED)
    subprocess.run(
        [sys.executable, "-m", "stepscope.watch", "--runs", str(tmp_path / "runs"), "train.py"],
        cwd=tmp_path,
        check=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    (folder,) = run_folders(tmp_path / "runs")
    assert said(folder) == [("no_step", "raised", "critical"), ("no_step", "cleared", "critical")]
    raised, cleared = alerts(folder)
    assert raised.step == 46
    assert cleared.step > 46
    assert [line["state"] for line in file.lines()] == ["raised", "cleared"]


PAUSED = """
import sys, time
import stepscope

rec = stepscope.init("paused", runs=sys.argv[1], sample=False)
for step in range(10_000):
    rec.step(loss=1.0)
    time.sleep(0.05)
    if rec.folder.joinpath("end").exists():
        break
"""


def test_a_paused_run_owes_no_step(tmp_path: Path, file: File) -> None:
    file.write("[rules.no_step]\nfor_s = 1\n", command=False)
    (tmp_path / "train.py").write_text(PAUSED)
    script = subprocess.Popen(
        [sys.executable, "train.py", str(tmp_path / "runs")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        wait_until(lambda: any(run_folders(tmp_path / "runs")), 30)
        (folder,) = run_folders(tmp_path / "runs")
        wait_until(lambda: read_run(folder).run_json["step"] > 80, 30)  # warm for some looks
        send_command(folder, CommandName.PAUSE, {})
        wait_until(lambda: read_run(folder).status is RunStatus.PAUSED)
        time.sleep(3)  # three times as long as the rule waits
        send_command(folder, CommandName.RESUME, {})
        wait_until(lambda: read_run(folder).status is RunStatus.RUNNING)
        (folder / "end").touch()
        script.wait(20)
    finally:
        script.kill()
        script.wait()
    assert said(folder) == []


def test_a_rule_of_ones_own_sees_what_the_run_records(tmp_path: Path, file: File) -> None:
    text = '[rules.big]\nmetric = "process/rss"\nabove = 1e6\ntext = "{value} is big"\n'
    text += '[rules.low]\nmetric = "my/score"\nbelow = 5\nclear = 6\nclear_s = 0\n'
    file.write(text, command=False)
    session = Session(tmp_path, name="x", kind=RunKind.INIT)
    recorder = session.recorder
    recorder.sample({"process/rss": 2.0e6})
    for score in (9.0, 4.0, 9.0):  # one low value among those of a second is enough
        recorder.log(recorder.step + 1, {"my/score": score})
    wait_until(lambda: len(said(tmp_path)) == 2)
    recorder.log(9, {"my/score": 8.0})
    wait_until(lambda: len(said(tmp_path)) == 3)
    session.close(RunStatus.FINISHED)
    found = {(event.data["rule"], event.data["state"]): event for event in alerts(tmp_path)}
    assert found["big", "raised"].text == "1.91 MiB is big"
    assert found["low", "raised"].data["metric"] == "my/score"
    assert ("low", "cleared") in found


def test_a_file_that_is_wrong_is_said_in_the_run_without_its_secret(
    tmp_path: Path, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    file.write('[webhook]\nurl = "gopher://x/T0KEN"\n', command=False)
    session = Session(tmp_path, name="x", kind=RunKind.INIT)
    session.close(RunStatus.FINISHED)
    with StoreReader(tmp_path) as reader:
        (event,) = reader.events()
    assert event.kind == "alerts_problem"
    assert "webhook: url must begin with" in event.text
    assert any("webhook: url" in message for message in caplog.messages)
    for written in tmp_path.glob("r*"):
        assert b"T0KEN" not in written.read_bytes()


def test_an_error_of_the_rules_ends_the_alerts_and_not_the_recording(
    tmp_path: Path, file: File, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("oops")

    file.write(command=False)
    session = Session(tmp_path, name="x", kind=RunKind.INIT)
    monkeypatch.setattr(session.alerts._evaluator, "evaluate", broken)
    session.recorder.log(1, {"train/loss": 1.0})
    wait_until(lambda: "stepscope: alerts ended; recording goes on" in caplog.messages)
    session.recorder.log(2, {"train/loss": 1.0})
    session.close(RunStatus.FAILED, "It broke.")
    assert said(tmp_path) == []
    assert read_run(tmp_path).run_json["step"] == 2


# --- the command ---


@contextmanager
def told(settings: AlertSettings) -> Iterator[AlertNotifier]:
    found = AlertNotifier(settings)
    yield found
    found.finish(10)


def command(*words: str, timeout_s: float = 10.0) -> AlertSettings:
    return AlertSettings(command=CommandChannel(argv=words, timeout_s=timeout_s))


def test_no_shell_reads_the_command(tmp_path: Path) -> None:
    file = tmp_path / "out"
    code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    with told(command(sys.executable, "-c", code, str(file), "$(id) ; ls")) as found:
        found.deliver(ALERT)
    assert file.read_text() == "$(id) ; ls"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["/no/such/program"], "cannot be started (No such file or directory)"),
        (
            [sys.executable, "-c", "print('why\\x1b[31m not'); raise SystemExit(3)"],
            "code 3: why not",
        ),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "did not end within 0.5 s"),
        (
            [
                sys.executable,
                "-c",
                "import sys; [sys.stdout.write('x' * 10**6) for _ in range(10**6)]",
            ],
            "did not end within 0.5 s",
        ),
    ],
    ids=["missing", "fails", "hangs", "prints without end"],
)
def test_a_command_that_fails_is_logged_once(
    words: list[str], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    with told(command(*words, timeout_s=10 if "code" in problem else 0.5)) as found:
        found.deliver(ALERT)
        found.deliver(ALERT)
    (message,) = (m for m in caplog.messages if "alerts: the command failed" in m)
    assert problem in message
    assert len(message) < 600


def test_what_a_command_has_started_does_not_outlive_its_time(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "open(sys.argv[1], 'w').write(str(p.pid)); time.sleep(60)"
    )
    file = tmp_path / "pid"
    with told(command(sys.executable, "-c", code, str(file), timeout_s=2)) as found:
        found.deliver(ALERT)
        wait_until(lambda: file.exists() and bool(file.read_text()))
    wait_until(
        lambda: (
            not Path(f"/proc/{file.read_text()}/cmdline").exists()
            or not Path(f"/proc/{file.read_text()}/cmdline").read_bytes()
        )
    )


def test_a_slow_command_delays_neither_the_run_nor_its_end(tmp_path: Path, file: File) -> None:
    code = "import time; time.sleep(30)"
    words = json.dumps([sys.executable, "-c", code])
    file.write(f"[command]\nargv = {words}\ntimeout_s = 2\n", command=False)
    session = Session(tmp_path, name="x", kind=RunKind.INIT)
    session.close(RunStatus.FAILED, "It broke.")
    # The run has ended while the command goes on.
    assert read_run(tmp_path).status is RunStatus.FAILED
    assert any(thread.name == "stepscope-alerts" for thread in threading.enumerate())


FAILS = """
import sys, stepscope
with stepscope.init("x", runs=sys.argv[1], sample=False) as rec:
    rec.step(loss=1.0)
    raise ValueError("no")
"""


def test_the_process_waits_for_what_is_still_to_be_told(tmp_path: Path, file: File) -> None:
    file.write()
    (tmp_path / "train.py").write_text(FAILS)
    subprocess.run(
        [sys.executable, "train.py", str(tmp_path / "runs")],
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    (line,) = file.lines()
    assert line["text"] == "The run failed: ValueError: no"


AT_EXIT = """
import atexit, sys, threading
from pathlib import Path
from stepscope.alerts.monitor import AlertMonitor
from stepscope.alerts.settings import AlertSettings, CommandChannel
from stepscope.run import RunStatus

def refused(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python 3.12 says

def end():
    threading.Thread.start = refused
    watch = made if sys.argv[2] == "before" else made_watch()
    print(watch.ended({"name": "x"}, 7, RunStatus.FAILED, "It broke."))
    watch.close()

def made_watch():
    words = (sys.executable, sys.argv[3], sys.argv[1])
    settings = AlertSettings(command=CommandChannel(argv=words), path=Path("x"))
    return AlertMonitor(settings, Path("/run"))

made = made_watch() if sys.argv[2] == "before" else None
atexit.register(end)
"""


@pytest.mark.parametrize("begun", ["before", "while the process ends"])
def test_an_alert_of_a_process_that_can_start_no_thread_any_more_is_told(
    tmp_path: Path, file: File, begun: str
) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-c", AT_EXIT, str(file.noted)),
            *(begun, str(file.path.with_name("notes.py"))),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "'rule': 'run_failed'" in ended.stdout, ended.stderr
    (line,) = file.lines()
    assert line["text"] == "The run failed: It broke."


def test_a_command_that_outlives_the_process_may_print(tmp_path: Path, file: File) -> None:
    (tmp_path / "slow.py").write_text(
        "import sys, time; time.sleep(4); print('x' * 100_000, flush=True); "
        "open(sys.argv[1], 'w').write('told')"
    )
    words = [sys.executable, str(tmp_path / "slow.py"), str(tmp_path / "done")]
    file.write(f"[command]\nargv = {json.dumps(words)}\n", command=False)
    (tmp_path / "train.py").write_text(FAILS)
    subprocess.run(
        [sys.executable, "train.py", str(tmp_path / "runs")],
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    done = tmp_path / "done"
    assert not done.exists()
    wait_until(lambda: done.exists() and done.read_text() == "told", 20)


def test_too_many_alerts_are_left_out_and_the_last_words_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notifier, "QUEUE_LIMIT", 2)
    words = (sys.executable, "-c", "import time; time.sleep(0.5)")
    with told(command(*words)) as found:
        for _ in range(9):
            found.deliver(ALERT)
        assert found.finish(0.05) is False
    assert "more than 2 alerts wait" in caplog.text
    assert "could not be delivered within 0.05 s" in caplog.text


# --- the webhook ---


@dataclass
class Receiver:
    """A local server: answers with the next of `codes` (200 at last) after `delay_s`."""

    codes: list[int] = field(default_factory=list)
    delay_s: float = 0.0
    held: threading.Event | None = None
    """No answer before it is set."""
    location: str = ""
    got: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    url: str = ""

    def settings(self, timeout_s: float = 5.0) -> AlertSettings:
        return AlertSettings(webhook=WebhookChannel(url=f"{self.url}/T0KEN", timeout_s=timeout_s))


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.got.append((self.path, json.loads(body)))
            time.sleep(found.delay_s)
            if found.held is not None:
                found.held.wait(60)
            self.send_response(found.codes.pop(0) if found.codes else 200)
            if found.location:
                self.send_header("Location", found.location)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(notifier, "PAUSES_S", (0.05, 0.05))
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def post(receiver: Receiver, timeout_s: float = 5.0) -> None:
    with told(receiver.settings(timeout_s)) as found:
        found.deliver(ALERT)


def test_the_webhook_gets_the_alert_as_json(receiver: Receiver) -> None:
    post(receiver)
    assert receiver.got == [("/T0KEN", msgspec.to_builtins(ALERT))]
    assert receiver.got[0][1]["text"] == "It is hot"


def test_a_server_that_fails_is_asked_again(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.codes = [503, 429]
    post(receiver)
    assert len(receiver.got) == 3
    assert "failed" not in caplog.text


@pytest.mark.parametrize(
    ("codes", "tries", "words"),
    [([500] * 3, 3, "it answered 500"), ([404], 1, "it answered 404"), ([301], 1, "it redirects")],
)
def test_a_server_that_refuses_is_said_once_without_the_address(
    receiver: Receiver, caplog: pytest.LogCaptureFixture, codes: list[int], tries: int, words: str
) -> None:
    receiver.codes, receiver.location = list(codes), "file:///etc/passwd"
    post(receiver)
    assert len(receiver.got) == tries
    assert words in caplog.text
    assert "the webhook at http://127.0.0.1/…" in caplog.text
    assert "T0KEN" not in caplog.text
    assert "passwd" not in caplog.text


def test_a_redirect_to_another_address_is_not_followed(receiver: Receiver) -> None:
    for code in (301, 302, 303, 307, 308):
        receiver.codes, receiver.location = [code], f"{receiver.url}/elsewhere"
        post(receiver)
    assert {path for path, _ in receiver.got} == {"/T0KEN"}
    assert len(receiver.got) == 5


def test_a_slow_server_is_given_up_after_its_time(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.delay_s = 1.0
    post(receiver, timeout_s=0.2)
    assert len(receiver.got) == 3
    assert "no answer within 0.2 s" in caplog.text


def test_a_webhook_that_does_not_answer_delays_no_command(
    tmp_path: Path, file: File, receiver: Receiver
) -> None:
    words = (sys.executable, str(file.path.with_name("notes.py")), str(file.noted))
    receiver.held = threading.Event()
    slow = WebhookChannel(url=f"{receiver.url}/T0KEN", timeout_s=30)
    with told(AlertSettings(command=CommandChannel(argv=words), webhook=slow)) as found:
        found.deliver(ALERT)
        found.deliver(ALERT)
        wait_until(lambda: len(file.lines()) == 2)
        assert len(receiver.got) == 1  # the second request waits for the first answer
        found._stopping.set()
        receiver.held.set()


def test_a_server_that_is_not_there_is_said(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.url = "http://127.0.0.1:9"
    post(receiver)
    assert "no connection (Connection refused)" in caplog.text
    assert "T0KEN" not in caplog.text


# --- crashes ---


def test_the_server_tells_of_a_killed_run_once(
    tmp_path: Path, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    file.write('[rules.run_failed]\ntext = "At {step}: {value}"\n[rules.Hot]\nabove = 1\n')
    with killed(tmp_path) as folder:
        watch = CrashWatch(RunIndex(folder.parent))
        wait_until(lambda: watch.look() == [folder.name])
        (event,) = alerts(folder)
        assert event.data["rule"] == "run_failed"
        assert "gone without a word" in event.text
        assert event.text.startswith("At ")
        assert len([m for m in caplog.messages if "small letters" in m]) == 1
        with StoreReader(folder) as reader:  # what the process had not stored is there, before it
            rows = [info.rows for info in reader.series() if info.stream == "steps"]
        assert rows == [event.step]
        assert (folder / MARKER).exists()
        wait_until(lambda: len(file.lines()) == 1)
        # Neither another look nor another server tells again.
        assert watch.look() == []
        watch._known.clear()
        assert watch.look() == []
        assert len([m for m in caplog.messages if "small letters" in m]) == 1
        assert CrashWatch(RunIndex(folder.parent)).look() == []
        assert len(alerts(folder)) == 1
        assert file.lines()[0]["run"] == folder.name


def test_an_old_crash_one_of_another_host_and_one_that_was_switched_off_are_no_news(
    tmp_path: Path, file: File
) -> None:
    with killed(tmp_path) as folder:
        wait_until(lambda: read_run(folder).status is RunStatus.CRASHED)
        path = folder / "run.json"
        original = path.read_text()
        cases: list[tuple[str, Callable[[dict[str, object]], object]]] = [
            ("", lambda told: told.update(heartbeat=time.time() - 3600)),
            ("", lambda told: told.update(host="elsewhere", heartbeat=time.time() - 60)),
            ("", lambda told: told.update(user="somebody")),
            ("[rules.run_failed]\nenabled = false\n", lambda told: None),
        ]
        for text, change in cases:
            file.write(text)
            run_json = json.loads(original)
            change(run_json)
            path.write_text(json.dumps(run_json))
            age = run_json["heartbeat"]
            os.utime(path, (age, age))
            assert CrashWatch(RunIndex(folder.parent)).look() == []
            assert not (folder / MARKER).exists()
        file.write("")
        path.write_text(original)
        os.utime(path)
        assert CrashWatch(RunIndex(folder.parent)).look() == [folder.name]


def test_the_watch_is_a_thread_that_looks_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[int] = []
    twice = threading.Event()

    def look() -> list[str]:
        looks.append(len(looks))
        if len(looks) == 1:
            raise OSError("no such folder")
        twice.set()
        return []

    monkeypatch.setattr(crash_watch, "PERIOD_S", 0.01)
    watch = CrashWatch(RunIndex(tmp_path))
    monkeypatch.setattr(watch, "look", look)
    watch.start()
    assert twice.wait(30)
    watch.close()
    assert not any(thread.name == "stepscope-crashes" for thread in threading.enumerate())
    (record,) = caplog.records
    assert "no such folder" in str(record.exc_info)
