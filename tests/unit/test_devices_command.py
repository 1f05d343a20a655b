"""The command `stepscope devices`: its table, JSON, repetition, and ends."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

from stepscope.cli import INTERRUPTED, CommandError, devices, main
from stepscope.cli.devices import table
from stepscope.gpu.source import NullSource
from tests.support.fake_machine import FakeSource, Gpu, divided, gpus, machine, process

SHOW = devices.show.__kwdefaults__
NO_DRIVER = NullSource("The NVIDIA driver is not loaded.")


def lines_of(*found: Gpu, columns: int = 200) -> list[str]:
    return list(table(machine(FakeSource(list(found))).poll(), columns))


def views(count: int, found: Gpu, **options: Any) -> None:
    """Show so many views, which Ctrl-C ends."""
    left = [count]

    def sleep(seconds: float) -> None:
        if seconds != devices.FIRST_WAIT_S:
            left[0] -= 1
        if left[0] <= 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        devices.show(machine(FakeSource([found])), watch_s=1.0, sleep=sleep, **options)


def test_once_it_prints_a_table_of_rates_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    source, pauses = FakeSource(gpus(2)), []
    devices.show(machine(source), sleep=pauses.append)
    out = capsys.readouterr().out
    assert out.count("NVIDIA H100") == 2
    assert pauses == [devices.FIRST_WAIT_S], "rates take two polls"


def test_json_is_one_object_for_each_view(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices.show(machine(FakeSource(gpus(1))), as_json=True, sleep=lambda _: None)
    assert json.loads(capsys.readouterr().out)["devices"]
    views(3, *gpus(1), as_json=True)
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 3
    views(3, *gpus(1))
    out = capsys.readouterr().out
    assert (out.count("NVIDIA H100"), out.count("\x1b")) == (3, 0)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    views(3, *gpus(1))
    assert capsys.readouterr().out.count(devices.CLEAR) == 3, "a terminal is cleared"


def test_without_a_gpu_it_gives_the_reason_and_that_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(devices, "open_source", lambda: NO_DRIVER)
    assert main(["devices"]) == 0
    assert NO_DRIVER.reason in capsys.readouterr().out
    assert main(["devices", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reason"] == NO_DRIVER.reason
    monkeypatch.setattr(devices.show, "__kwdefaults__", {**SHOW, "sleep": interrupted})
    assert main(["devices", "--watch"]) == INTERRUPTED


def test_a_driver_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, source = threading.Event(), FakeSource(gpus(1))
    source.before_read = release.wait
    monkeypatch.setattr("stepscope.cli.DRIVER_TIMEOUT_S", 0.01)
    with pytest.raises(CommandError, match=r"did not answer within 0\.01 s"):
        devices.show(machine(source), sleep=lambda _: None)
    release.set()


@pytest.mark.parametrize("columns", [40, 120])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    found = [*gpus(2), divided(2)]
    found[0].processes = (process(command="python " + "x" * 500), process(pid=10**9, user="u" * 50))
    assert max(map(len, lines_of(*found, columns=columns))) <= columns


def test_a_block_has_what_is_known_of_a_gpu_and_reasons_for_the_rest() -> None:
    (gpu,) = gpus(1)
    gpu.missing = {"gpu/util": "permission"}
    gpu.processes = (process(1, state="zombie"), process(2, user="bob", yours=False, memory=None))
    text = "\n".join(lines_of(gpu))
    for words in (
        "   Utilization n/a (permission) · SM active 71% · tensor active 33% · DRAM active 45%",
        "   Memory 40.0 GiB · total 80.0 GiB",
        "power 553 W · limit 700 W",
        "   ! 1 dead process still on the GPU",
    ):
        assert words in text
    assert re.search(r"^   \*       1 ada .*\[zombie\] python train.py", text, re.MULTILINE)
    assert re.search(r"^           2 bob +n/a", text, re.MULTILINE)


def test_a_process_on_an_instance_is_listed_once_below_it() -> None:
    gpu = divided()
    on_both = gpu.instances[0].processes
    assert on_both is not None
    gpu.processes = (*on_both, process(9))
    lines = lines_of(gpu)
    at = next(number for number, line in enumerate(lines) if "MIG 1g.10gb" in line)
    assert lines[at].startswith("   MIG 1g.10gb · MIG-00000001 · Memory 3.00 GiB · total 10.0 GiB")
    assert lines[at + 1].startswith("           5001 bob")
    assert sum(" 5001 " in line for line in lines) == 1


def test_no_name_can_control_the_terminal() -> None:
    (gpu,) = gpus(1)
    evil = "\x1b[2J\x1b]0;pwned\x07\n\r"
    gpu.processes = (process(command=evil, user=evil, name=evil),)
    gpu.missing = {"gpu/util": evil}
    assert not {"\x1b", "\r", "\x07", "\n"} & set("".join(lines_of(gpu)))
