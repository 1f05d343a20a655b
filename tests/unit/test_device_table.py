"""What `stepscope devices` prints: blocks that fit the terminal, gaps in words, hostile names."""

from __future__ import annotations

import json

import pytest

from stepscope.cli.devices import table
from stepscope.gpu.source import NullSource
from tests.support.fake_machine import FakeSource, Gpu, divided, gpus, machine, process


def text(*found: Gpu, columns: int = 80) -> str:
    return "\n".join(table(machine(FakeSource(list(found))).poll(), columns))


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("count", [1, 16])
def test_no_line_is_wider_than_the_terminal(count: int, columns: int) -> None:
    found = [*gpus(count), divided(count)]
    found[0].processes = (process(command="python " + "x" * 500), process(pid=10**9, user="u" * 50))
    found[0].values["gpu/throttle_reasons"] = 0x60
    lines = table(machine(FakeSource(found)).poll(), columns)
    assert max(map(len, lines)) <= columns
    assert sum(line.startswith(tuple("0123456789")) for line in lines) >= count


def test_a_block_has_all_that_is_known_of_a_gpu() -> None:
    said = text(*gpus(1), columns=200)
    for words in (
        "1 GPU · driver 580.95.05 · CUDA 13.0",
        "0  NVIDIA H100 80GB HBM3",
        "GPU-00000000  00000000:17:00.0",
        "Utilization 97%",
        "active: SM 71%, tensor 33%, DRAM 45%",
        "Memory 40.0 GiB of 80.0 GiB (50%)",
        "Temperature 61 °C (slows down at 92, off at 95) · memory 68 °C · power 553 of 700 W",
        "SM clock 1755 of 1980 MHz · memory clock 2619 MHz · PCIe gen 5 ×16",
        "PCIe out 1.50 GiB/s in 256 MiB/s · NVLink out 0 B/s in 0 B/s",
        "   Clocks since the driver was loaded: 10 s power-limited, normal",
        "ok Working.",
        "*    4000 ada         38.0 GiB   96%  python train.py --epochs 3",
        "* your process",
    ):
        assert words in said


def test_a_missing_value_has_its_reason() -> None:
    (gpu,) = gpus(1)
    gpu.missing = {"gpu/util": "permission", "gpu/power": "not supported on this GPU"}
    gpu.processes, gpu.missing["processes"] = None, "permission"
    said = text(gpu, columns=200)
    assert "Utilization n/a (permission)" in said
    assert "power n/a (not supported on this GPU) of 700 W" in said
    assert "Processes n/a (permission)" in said
    assert "your process" not in said


def test_zombies_are_named_and_foreign_processes_not_marked() -> None:
    (gpu,) = gpus(1)
    gpu.processes = (
        process(1, state="zombie", sm=None),
        process(2, user="bob", yours=False, memory=None),
    )
    lines = text(gpu, columns=120).splitlines()
    dead = next(line for line in lines if " 1 ada" in line)
    assert dead.startswith("   *")
    assert "[zombie] python train.py" in dead
    other = next(line for line in lines if " 2 bob" in line)
    assert other.startswith("    ")
    assert "n/a" in other
    assert any(line.startswith("   !  A dead process still holds") for line in lines)


def test_instances_stand_indented_under_their_parent() -> None:
    lines = text(divided(), columns=120).splitlines()
    at = next(number for number, line in enumerate(lines) if "MIG 1g.10gb" in line)
    assert lines[at].startswith("   MIG 1g.10gb · MIG-00000001 · Memory 3.00 GiB of 10.0 GiB (30%)")
    assert lines[at + 1].startswith("           5001 bob")
    assert "MIG 3g.40gb" in lines[at + 2]


def test_a_process_on_an_instance_is_listed_once() -> None:
    gpu = divided()
    on_both = gpu.instances[0].processes
    assert on_both is not None
    gpu.processes = (*on_both, process(9))
    lines = text(gpu, columns=120).splitlines()
    assert [line for line in lines if " 5001 " in line] == [
        line for line in lines if line.startswith("           5001")
    ]
    assert sum(" 5001 " in line for line in lines) == 1
    assert lines[-3].startswith("   *       9 ada")


def test_no_name_can_steer_the_terminal() -> None:
    (gpu,) = gpus(1)
    evil = "\x1b[2J\x1b]0;pwned\x07\n\r"
    gpu.processes = (process(command=evil, user=evil, name=evil),)
    gpu.missing = {"gpu/util": evil}
    gpu.recovery = evil
    said = text(gpu)
    assert "\x1b" not in said
    assert "\r" not in said
    assert "\x07" not in said


def test_without_a_gpu_the_sources_own_words_say_why() -> None:
    reason = "The NVIDIA driver was updated while loaded: restart the machine."
    said = table(machine(NullSource(reason)).poll(), 200)
    assert said[-1] == reason
    assert "0 GPUs" in said[0]
    narrow = table(machine(NullSource(reason)).poll(), 40)
    assert " ".join(narrow).endswith(reason)
    assert json.dumps(said), "plain text"
