"""The Hardware page: rows of the machine's GPUs, what is missing and why, and the history."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from dashboard.machine.machine_poller import PastReading
from dashboard.machine.tables import Row, gpu_rows, history_figure, process_rows, value_rows
from stepscope.gpu.machine_monitor import NOT_WATCHED
from stepscope.gpu.machine_state import DeviceState, MachineState
from stepscope.gpu.xid import xid_event
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
    found = value_rows(device)
    assert all(row["Meaning"] for row in found)
    return {row["Value"]: row["Reading"] for row in found}


def test_a_row_has_how_much_and_how_well() -> None:
    (row,) = rows(gpus(1)[0])
    assert (row["GPU"], row["Torch"], row["Health"]) == ("GPU 0", "cuda:3", "✓ Working.")
    assert (row["Utilization"], row["Memory"]) == (97.0, 50.0)
    assert row["Memory used"] == "40.0 of 80.0 GiB"
    assert (row["Temperature"], round(row["Power"]), row["SM clock"]) == (61, 553, 1755)


def test_recorded_runs_and_the_largest_processes_are_named_by_whose_they_are() -> None:
    (gpu,) = gpus(1)
    gpu.processes = (
        process(1, memory=GIB, user="carol", yours=False),
        process(2, memory=2 * GIB),
        process(3, memory=3 * GIB, user="bob", yours=False, name="ollama"),
    )
    (row,) = rows(gpu, ours={2: "digits_cnn"})
    assert row["Processes"] == "run digits_cnn: python 2.00 GiB, bob: ollama 3.00 GiB, 1 more"
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


def test_every_value_is_there_or_says_why_not() -> None:
    (gpu,) = gpus(1)
    (device,) = seen(gpu, looks=2).devices
    found = values(device)
    expected = {"Tensor cores active": "33%", "Power limit": "700 W"}
    expected |= {"Energy counter": "1.00 kJ (0.278 Wh)", "Power-capped time": "10 s"}
    expected |= {"PCIe link": "gen 5 ×16, at most gen 5 ×16", "PCIe sent": "1.50 GiB/s"}
    assert expected.items() <= found.items()
    assert found["Fan"] == "n/a: no answer yet"
    gpu.missing = dict.fromkeys(gpu.values, "permission")
    (device,) = seen(gpu).devices
    hidden = values(device)
    assert hidden["SM active"] == "n/a: permission"
    assert found.keys() == hidden.keys(), "no row comes and goes"


@pytest.mark.parametrize("gpu", [Gpu(info(), {}, facts=None), Gpu(lost="lost: x")])
def test_every_state_of_a_gpu_has_values(gpu: Gpu) -> None:
    (device,) = seen(gpu).devices
    assert values(device)["UUID"] == device.info.uuid


def test_errors_of_the_driver_are_named_newest_first_and_none_is_not_unknown() -> None:
    watched = machine(FakeSource(gpus(1)), FakeClock())

    def shown() -> str:
        (device,) = watched.poll().devices
        return values(device)["Xid errors"]

    assert shown() == f"n/a: {NOT_WATCHED}"
    watched.xid_watcher = Mock(reason=lambda uuid: None)
    assert shown() == "none seen"
    for code in (31, 79):
        watched.note_xid(xid_event(info().uuid, code))
    assert shown().index("79") < shown().index("31")


def test_processes_are_whole_with_those_of_instances() -> None:
    (gpu,) = gpus(1)
    gpu.processes = (process(7), process(8, yours=False, user="bob", state="zombie"))
    (device,) = seen(gpu).devices
    found = process_rows(device, {})
    assert [(row["Owner"], row["State"]) for row in found][1] == ("bob", "zombie")
    (device,) = seen(divided()).devices
    assert {row["MIG"] for row in process_rows(device, {})} >= {"1g.10gb", "3g.40gb"}


def test_the_history_has_a_line_per_gpu_with_gaps() -> None:
    first, other = info(0), info(5)
    key = "gpu/mem_used"
    past = [
        PastReading(90.0, {first.uuid: {key: 2.0 * GIB}}),
        PastReading(91.0, {first.uuid: {}, other.uuid: {key: 1.0 * GIB}}),
    ]
    lines = history_figure(key, [first, other], past, 100.0)["data"]
    assert [line["name"] for line in lines] == ["GPU 0", "GPU 5"]
    assert lines[0]["x"].tolist() == [-10, -9]
    np.testing.assert_array_equal([line["y"] for line in lines], [[2.0, np.nan], [np.nan, 1.0]])
