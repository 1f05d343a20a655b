"""The Hardware page: rows of the machine's GPUs, what is missing and why, and the history."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from dashboard.charts.machine import history_figure
from dashboard.machine.tables import Row, gpu_rows, process_rows, value_rows
from stepscope.gpu.machine_monitor import DRAWN, NOT_WATCHED, DeviceReading
from stepscope.gpu.machine_state import DeviceState, MachineState
from stepscope.gpu.xid import NO_INSTANCE, xid_event
from tests.support.fake_machine import (
    GIB,
    FakeSource,
    Gpu,
    divided,
    gpus,
    info,
    machine,
    process,
)
from tests.support.fake_nvml import FakeClock


def seen(*found: Gpu, looks: int = 1) -> MachineState:
    clock = FakeClock()
    watched = machine(FakeSource(list(found)), clock)
    for _ in range(looks):
        clock.now += 1
        view = watched.poll()
    return view


def rows(*found: Gpu, ours: dict[int, str] | None = None) -> list[Row]:
    return gpu_rows(seen(*found), {info().uuid: 3}, ours or {})


def values(device: DeviceState) -> dict[str, str]:
    """Return the readings of a GPU by their label."""
    found = value_rows(device, 1.7e9, "cuda:0")
    assert all(row["Meaning"] for row in found)
    return {row["Value"]: row["Reading"] for row in found}


def test_a_row_has_who_how_much_and_how_well() -> None:
    (row,) = rows(gpus(1)[0])
    assert (row["GPU"], row["Torch"], row["Health"]) == ("GPU 0", "cuda:3", "✓ Working.")
    assert (row["Utilization"], row["Memory"]) == (97.0, 50.0)
    assert row["Memory used"] == "40.0 of 80.0 GiB"
    assert (row["Temperature"], round(row["Power"]), row["SM clock"]) == (61, 553, 1755)
    assert row["Processes"] == "you: python 38.0 GiB"


def test_recorded_runs_and_the_largest_processes_are_named_by_whose_they_are() -> None:
    (gpu,) = gpus(1)
    gpu.processes = (
        process(1, memory=GIB, user="carol", yours=False),
        process(2, memory=3 * GIB),
        process(3, memory=2 * GIB, user="bob", yours=False, name="ollama"),
    )
    (row,) = rows(gpu, ours={2: "digits_cnn"})
    assert row["Processes"] == "run digits_cnn: python 3.00 GiB, bob: ollama 2.00 GiB, 1 more"
    gpu.processes = ()
    assert rows(gpu)[0]["Processes"] == "none"
    gpu.processes, gpu.missing = None, {"processes": "permission"}
    assert rows(gpu)[0]["Processes"] == "n/a: permission"


def test_what_a_row_lacks_has_its_reason_and_a_lost_gpu_only_in_its_health() -> None:
    (gpu,) = gpus(1)
    gpu.missing = dict.fromkeys(gpu.values, "permission")
    (row,) = rows(gpu)
    assert (row["Utilization"], row["Memory"], row["Memory used"]) == (
        None,
        None,
        "n/a: permission",
    )
    (row,) = rows(Gpu(lost="lost: GPU is lost", processes=None))
    assert row["Health"] == "✕ Lost: GPU is lost. Retrying."
    assert (row["Memory used"], row["Processes"]) == ("n/a", "n/a")


def test_a_divided_gpu_has_a_row_per_instance() -> None:
    found = rows(divided())
    assert [row["Name"] for row in found[1:]] == ["1g.10gb", "3g.40gb"]
    assert found[0]["Utilization"] is None
    assert found[2]["Memory used"] == "3.00 of 20.0 GiB"


def test_every_value_is_there_or_says_why_not() -> None:
    (gpu,) = gpus(1)
    (device,) = seen(gpu, looks=2).devices
    found = values(device)
    expected = {"Tensor cores active": "33%", "SM occupancy": "22%", "Power limit": "700 W"}
    expected |= {"Slowdown temperature": "92 °C", "SM clock": "1,755 MHz"}
    expected |= {"Highest SM clock": "1,980 MHz", "PCIe link": "gen 5 ×16, at most gen 5 ×16"}
    expected |= {"PCIe sent": "1.50 GiB/s", "Clocks lowered": "Not throttled in 1 s."}
    assert expected.items() <= found.items()
    assert found["Energy"].startswith("0 J (0 Wh) since ")
    assert found["Fan"] == "n/a: no answer yet"
    gpu.missing = dict.fromkeys(gpu.values, "permission")
    (device,) = seen(gpu).devices
    hidden = values(device)
    assert hidden["SM active"] == hidden["Energy"] == "n/a: permission"
    assert found.keys() == hidden.keys(), "no row comes and goes"


@pytest.mark.parametrize("gpu", [divided(), Gpu(info(), {}, facts=None), Gpu(lost="lost: x")])
def test_every_state_of_a_gpu_has_values(gpu: Gpu) -> None:
    (device,) = seen(gpu).devices
    assert values(device)["UUID"] == device.info.uuid


def test_errors_of_the_driver_are_named_newest_first_and_none_is_not_unknown() -> None:
    clock = FakeClock()
    watched = machine(FakeSource(gpus(1)), clock)
    found = []
    for code in (None, None, 31, 79):
        if found:
            watched.xid_watcher = Mock(reason=lambda uuid: None)
        if code is not None:
            watched.note_xid(xid_event(info().uuid, code, NO_INSTANCE))
        clock.now += 2
        (device,) = watched.poll().devices
        found.append(values(device)["Xid errors"])
    assert found[:2] == [f"n/a: {NOT_WATCHED}", "none seen"]
    assert found[3].index("79") < found[3].index("31")


def test_throttle_time_is_given_by_reason_in_words() -> None:
    (gpu,) = gpus(1)
    clock = FakeClock()
    watched = machine(FakeSource([gpu]), clock)
    watched.poll()
    clock.now += 60
    gpu.values["gpu/throttle_sw_thermal"] += 15.0
    (device,) = watched.poll().devices
    expected = "In 1 min 00 s: 15 s (25%) thermal slowdown (software)."
    assert values(device)["Clocks lowered"] == expected


def test_processes_are_whole_with_those_of_instances() -> None:
    (gpu,) = gpus(1)
    gpu.processes = (process(7), process(8, yours=False, user="bob", state="zombie"))
    (device,) = seen(gpu).devices
    found = process_rows(device, {})
    assert [row["Owner"] for row in found] == ["you", "bob"]
    assert found[1]["State"] == "zombie"
    (device,) = seen(divided()).devices
    assert {row["MIG"] for row in process_rows(device, {})} - {""} <= {"1g.10gb", "3g.40gb"}


def test_the_history_has_a_line_per_gpu_with_gaps() -> None:
    place = DRAWN.index("gpu/mem_used")

    def reading(ts: float, used: float | None) -> DeviceReading:
        values: list[float | None] = [None] * len(DRAWN)
        values[place] = used
        return DeviceReading(ts, tuple(values))

    readings = {0: [reading(90.0, 2.0 * GIB), reading(91.0, None)], 5: [reading(91.0, 1.0 * GIB)]}
    figure = history_figure("gpu/mem_used", readings, 100.0)
    first, second = figure["data"]
    assert (first["name"], second["name"]) == ("GPU 0", "GPU 5")
    assert first["x"].tolist() == [-10, -9]
    assert first["y"][0] == 2.0
    assert np.isnan(first["y"][1])
    assert second["y"].tolist() == [1.0]
    assert figure["layout"]["xaxis"]["range"] == [-60, 0]
