"""The command `stepscope devices`: once, again and again, as JSON, without a GPU, and its ends."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from stepscope.cli import INTERRUPTED, devices, main
from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.source import NullSource
from tests.support.fake_machine import FakeSource, gpus, machine

SHOW = devices.show.__kwdefaults__
NO_DRIVER = NullSource("The NVIDIA driver is not loaded.")


class Terminal(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def times(count: int) -> Callable[[float], None]:
    """A sleep that is interrupted by Ctrl-C at the end of so many views."""
    left = [count]

    def sleep(seconds: float) -> None:
        if seconds == devices.FIRST_WAIT_S:
            return
        left[0] -= 1
        if left[0] <= 0:
            raise KeyboardInterrupt

    return sleep


def watched(count: int, found: MachineMonitor, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        devices.show(found, watch_s=1.0, sleep=times(count), **options)


def test_once_it_prints_a_table_of_rates_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    source, pauses = FakeSource(gpus(2)), []
    assert devices.show(machine(source), sleep=pauses.append) == 0
    out = capsys.readouterr().out
    assert out.count("NVIDIA H100") == 2
    assert source.armed is False, "left to other programs again"
    assert pauses == [devices.FIRST_WAIT_S], "rates take two polls"
    assert len(source.reads) == 2 * (4 + 3), "the clock does not move: rare values once"


def test_json_is_one_object_for_each_view(capsys: pytest.CaptureFixture[str]) -> None:
    assert devices.show(machine(FakeSource(gpus(1))), as_json=True, sleep=lambda _: None) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["values"]["gpu/util"] == 97.0
    watched(3, machine(FakeSource(gpus(1))), as_json=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(json.loads(line)["devices"] for line in lines)


def test_without_a_terminal_each_view_follows_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    watched(3, machine(FakeSource(gpus(1))))
    out = capsys.readouterr().out
    assert out.count("NVIDIA H100") == 3
    assert "\x1b" not in out
    assert "\n\n" in out


def test_on_a_terminal_it_draws_over_itself_and_never_clears_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((100, 50)))
    watched(3, machine(FakeSource(gpus(1))))
    drawn = screen.getvalue()
    assert drawn.startswith(devices.CLEAR + devices.HOME)
    assert drawn.count(devices.CLEAR) == 1
    assert drawn.count(devices.HOME) == 3
    assert drawn.endswith(devices.CLEAR_BELOW)
    lines = drawn.rpartition(devices.HOME)[2].splitlines()
    assert all(line.endswith(devices.CLEAR_LINE) for line in lines[:-1])


def test_a_table_that_does_not_fit_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((80, 24)))
    drawn = devices.in_place(machine(FakeSource(gpus(16))).poll())
    lines = [line.removesuffix(devices.CLEAR_LINE) for line in drawn.splitlines()]
    assert len(lines) == 24, "23 lines and what clears below them: nothing scrolls"
    assert lines[-2] == "Enlarge the window or use --json to see everything."


def test_without_a_gpu_it_says_why_and_that_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "open_source", lambda: NO_DRIVER)
    assert main(["devices"]) == 0
    assert "The NVIDIA driver is not loaded." in capsys.readouterr().out
    assert main(["devices", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reason"] == "The NVIDIA driver is not loaded."


def test_ctrl_c_is_the_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(devices, "open_source", lambda: NO_DRIVER)
    monkeypatch.setattr(devices.show, "__kwdefaults__", {**SHOW, "sleep": interrupted})
    assert main(["devices", "--watch"]) == INTERRUPTED


def test_a_driver_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release, source = threading.Event(), FakeSource(gpus(1))
    source.before_read = release.wait
    monkeypatch.setattr(devices, "SILENT_S", 0.01)
    monkeypatch.setattr(devices, "END_S", 0.01)
    assert devices.show(machine(source), sleep=lambda _: None) == 1
    release.set()
    assert "did not answer within 0.01 s" in capsys.readouterr().err


def test_an_error_of_the_look_is_raised_and_its_thread_ends() -> None:
    source = FakeSource(gpus(1))
    source.before_read = lambda: 1 / 0  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        devices.show(machine(source), sleep=lambda _: None)
