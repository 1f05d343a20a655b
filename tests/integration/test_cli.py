"""`stepscope record` with signals and a page's commands."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stepscope.cli import CommandError
from stepscope.cli.record import record
from stepscope.gpu.source import NullSource, open_source
from stepscope.run import RunStatus, read_run, run_folders
from stepscope.store import StoreReader
from stepscope.store.reader import send_command
from tests.support.child_process import ROOT
from tests.support.fake_nvml import FakeGpu, FakeNvml, install
from tests.support.run_values import block_of, steps_of

NO_GPU = NullSource("There is no driver.")

RECORD = """
import signal, sys
from stepscope.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one
sys.exit(main(["record", "--host", "--period", "0.05"]))
"""


def test_a_refusal_prints_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record(tmp_path / "runs", NO_GPU) == 0
    out = capsys.readouterr().out
    assert NO_GPU.reason in out
    assert len(out.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="STEPSCOPE_RUNS"):
        record(tmp_path / "file", NO_GPU, seconds=1, host_alone=True)


def test_it_records_every_gpu_and_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml(FakeGpu("GPU-a", util=40), FakeGpu("GPU-b", util=60)))
    assert record(tmp_path, open_source(), name="rack 4", seconds=0.5, period_s=0.02) == 0
    (folder,) = run_folders(tmp_path)
    run = read_run(folder)
    assert (run.status, run.reason) == (RunStatus.FINISHED, None)
    assert (run.run_json["kind"], run.run_json["name"]) == ("record", "rack 4")
    assert sorted(run.run_json["commands"]) == ["mark", "stop"]
    assert [device["uuid"] for device in run.run_json["devices"]] == ["GPU-a", "GPU-b"]
    for uuid, util in (("GPU-a", 40.0), ("GPU-b", 60.0)):
        block = block_of(folder, "devices", uuid)
        assert set(block.mean[block.keys.index("gpu/util")]) == {util}
    assert "host/mem_used" in block_of(folder, "samples").keys
    assert steps_of(folder) == 0


def test_the_page_can_mark_and_stop_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def page() -> None:
        while not list(run_folders(tmp_path)):
            time.sleep(0.01)
        (folder,) = run_folders(tmp_path)
        while read_run(folder).status is not RunStatus.RUNNING:
            time.sleep(0.01)
        send_command(folder, "mark", {"text": "fan swapped"})
        send_command(folder, "pause", {})
        send_command(folder, "stop", {})

    thread = threading.Thread(target=page)
    thread.start()
    assert record(tmp_path, NO_GPU, host_alone=True) == 0
    thread.join()
    (folder,) = run_folders(tmp_path)
    run = read_run(folder)
    assert run.status is RunStatus.STOPPED
    with StoreReader(folder) as reader:
        events = {event.kind: (event.text, event.data["ok"]) for event in reader.events()}
    assert events["mark"] == ("fan swapped", True)
    assert events["pause"][1] is False
    assert events["stop"][1] is True


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")],
)
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: int, name: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RECORD],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "STEPSCOPE_RUNS": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline()  # it records
    (folder,) = run_folders(tmp_path)
    while read_run(folder).status is not RunStatus.RUNNING:
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert len(out.splitlines()) == 1
    run = read_run(folder)
    assert run.status is RunStatus.STOPPED
    assert name in str(run.reason)
    assert len(block_of(folder, "samples")) > 0


def test_a_signal_at_the_first_line_ends_it_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            if str(tmp_path) in text:
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Terminal())
    former = signal.signal(signal.SIGINT, lambda *_: pytest.fail("no handler"))
    try:
        assert record(tmp_path, NO_GPU, host_alone=True) == 0
    finally:
        signal.signal(signal.SIGINT, former)
    (folder,) = run_folders(tmp_path)
    assert read_run(folder).status is RunStatus.STOPPED


def test_a_signal_that_the_caller_ignores_stays_ignored(tmp_path: Path) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGHUP))
    try:
        timer.start()
        assert record(tmp_path, NO_GPU, seconds=0.4, host_alone=True) == 0
        (folder,) = run_folders(tmp_path)
        assert read_run(folder).status is RunStatus.FINISHED
    finally:
        timer.join()
        signal.signal(signal.SIGHUP, former)
