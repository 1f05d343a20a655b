"""The words of the page Devices: the machine, cards, details, and what is missing and why."""

from __future__ import annotations

import pytest

from dashboard.machine.content import Json, details, history, machine_content
from stepscope.gpu.machine_monitor import DRAWN, DeviceSample
from stepscope.gpu.machine_state import MachineState
from stepscope.gpu.xid import NO_INSTANCE, xid_event
from tests.support.fake_machine import (
    GIB,
    FakeClock,
    FakeSource,
    Gpu,
    divided,
    gpus,
    info,
    machine,
    process,
)


def seen(*found: Gpu, looks: int = 1) -> MachineState:
    clock = FakeClock()
    watched = machine(FakeSource(list(found)), clock)
    for _ in range(looks):
        clock.now += 1
        view = watched.poll()
    return view


def page(
    *found: Gpu, cuda: dict[str, int] | None = None, ours: dict[int, str] | None = None
) -> Json:
    return machine_content(seen(*found), cuda or {}, ours or {})


def shown(gpu: Gpu, looks: int = 1) -> Json:
    (device,) = seen(gpu, looks=looks).devices
    return details(device, 1.7e9, {}, "cuda:0", device.values)


def rows(found: Json) -> dict[str, str]:
    """The facts of the details by their label."""
    return {row[0]: row[1] for group in found["groups"] for row in group["rows"]}


def test_a_card_says_who_how_much_and_how_well() -> None:
    (gpu,) = gpus(1)
    (card,) = page(gpu, cuda={gpu.info.uuid: 3})["cards"]
    assert (card["title"], card["cuda"], card["short"]) == ("GPU 0", "cuda:3", "GPU-00000000")
    assert (card["level"], card["health"]) == ("ok", "Working.")
    assert card["utilization"] == {"share": 97.0, "text": "97%"}
    assert card["memory"] == {"share": 50.0, "text": "40.0 of 80.0 GiB (50%)"}
    assert card["line"] == ["61 °C", "553 of 700 W", "1,755 MHz"]
    assert card["who"] == "you: python 38.0 GiB"


def test_recorded_runs_and_the_largest_processes_are_named_by_whose_they_are() -> None:
    (gpu,) = gpus(1)
    gpu.processes = (
        process(1, memory=GIB, user="carol", yours=False),
        process(2, memory=3 * GIB),
        process(3, memory=2 * GIB, user="bob", yours=False, name="ollama"),
    )
    (card,) = page(gpu, ours={2: "digits_cnn"})["cards"]
    assert card["who"] == "run digits_cnn: python 3.00 GiB, bob: ollama 2.00 GiB and 1 more"
    (card,) = page(gpu, ours={1: "small"})["cards"]
    assert card["who"] == "run small: python 1.00 GiB, you: python 3.00 GiB and 1 more"
    gpu.processes = ()
    assert page(gpu)["cards"][0]["who"] == "No processes."
    gpu.processes, gpu.missing = None, {"processes": "permission"}
    assert page(gpu)["cards"][0]["who"] == "Processes n/a: permission"


def test_what_a_card_lacks_has_its_reason_and_a_lost_gpu_only_in_its_health() -> None:
    (gpu,) = gpus(1)
    gpu.missing = dict.fromkeys(gpu.values, "permission")
    (card,) = page(gpu)["cards"]
    assert card["utilization"] == card["memory"] == {"share": None, "text": "n/a (permission)"}
    assert card["line"] == []
    (card,) = page(Gpu(lost="lost: GPU is lost", processes=None))["cards"]
    assert card["health"] == "Lost: GPU is lost. Retrying."
    assert card["utilization"] == card["memory"] == {"share": None, "text": "n/a"}
    assert card["who"] == "Processes unknown."


def test_a_divided_gpu_shows_its_instances_memory() -> None:
    (card,) = page(divided())["cards"]
    assert card["utilization"] == {"share": None, "text": "n/a (divided by MIG)"}
    assert card["who"] == "Divided into 2 MIG instances."
    assert [one["profile"] for one in card["instances"]] == ["1g.10gb", "3g.40gb"]
    assert card["instances"][1]["memory"]["text"] == "3.00 of 20.0 GiB (15%)"


def test_every_metric_is_there_or_says_why_not() -> None:
    (gpu,) = gpus(1)
    found = rows(shown(gpu, looks=2))
    expected = {"Tensor cores active": "33%", "SM occupancy": "22%", "Power limit": "700 W"}
    expected |= {"Slowdown temperature": "92 °C", "SM clock": "1,755 MHz of 1,980"}
    expected |= {"PCIe link": "gen 5 ×16, at most gen 5 ×16", "PCIe sent": "1.50 GiB/s"}
    expected |= {"Clocks lowered": "Not throttled in 1 s."}
    assert expected.items() <= found.items()
    assert found["Energy since first viewed"].startswith("0 J (0 Wh) since ")
    assert found["Fan"] == "n/a on this GPU: no answer yet"
    gpu.missing = dict.fromkeys(gpu.values, "permission")
    hidden = rows(shown(gpu))
    assert hidden["SM active"] == "n/a on this GPU: permission"
    assert hidden["Energy since first viewed"] == "n/a on this GPU: permission"
    assert found.keys() == hidden.keys(), "no row comes and goes"


def test_every_row_has_help_text_and_missing_values_are_marked() -> None:
    for gpu in (gpus(1)[0], divided(), Gpu(info(), {}, facts=None)):
        groups = shown(gpu)["groups"]
        assert [row[0] for group in groups for row in group["rows"] if not row[2]] == []
    missing = {row[0] for group in shown(gpus(1)[0])["groups"] for row in group["rows"] if row[3]}
    assert "Fan" in missing
    assert "GPU utilization" not in missing


def test_errors_of_the_driver_are_told_newest_first_and_none_is_not_unknown() -> None:
    clock = FakeClock()
    watched = machine(FakeSource(gpus(1)), clock)
    told = []
    for reason, code in (("not supported", None), (None, None), (None, 31), (None, 79)):
        watched.xid_reason = reason
        if code is not None:
            watched.note_xid(xid_event(info().uuid, code, NO_INSTANCE))
        clock.now += 2
        (device,) = watched.poll().devices
        told.append(rows(details(device, 0.0, {}, "cuda:0", device.values))["Xid errors"])
    watched.xid_refused = {"GPU-other": "permission"}
    assert watched.poll().devices[0].missing.get("xid") is None
    watched.xid_refused = {info().uuid: "permission"}
    assert watched.poll().devices[0].missing["xid"] == "permission"
    assert told[:2] == ["n/a: not supported", "none seen"]
    assert told[3] == (
        "Xid 79: the GPU has fallen off the bus, 2 s ago; "
        "Xid 31: a program accessed GPU memory that is not mapped, 4 s ago"
    )


def test_throttle_time_is_told_by_reason_in_words() -> None:
    (gpu,) = gpus(1)
    clock = FakeClock()
    watched = machine(FakeSource([gpu]), clock)
    watched.poll()
    clock.now += 60
    gpu.values["gpu/throttle_sw_thermal"] += 15.0
    (device,) = watched.poll().devices
    found = rows(details(device, 0.0, {}, "cuda:0", device.values))
    assert found["Clocks lowered"] == "In 1 min 00 s: 15 s (25%) thermal slowdown (software)."


def test_processes_are_whole_in_the_details() -> None:
    (gpu,) = gpus(1)
    gpu.processes = (process(7), process(8, yours=False, user="bob", state="zombie", sm=None))
    found = shown(gpu)["processes"]
    assert [one["whose"] for one in found] == ["you", ""]
    assert found[1]["state"] == "zombie"
    assert (found[0]["sm"], found[1]["sm"]) == ("96%", "n/a")
    gpu.processes = None
    hidden = shown(gpu)
    assert hidden["processes"] == []
    assert hidden["no_processes"] == "n/a on this GPU: no answer yet"


def test_only_charts_of_what_the_gpu_tells_are_drawn() -> None:
    found = shown(gpus(1)[0])["charts"]
    assert len(found) == 6
    assert found[3]["mark"] == {"value": 92.0, "label": "slowdown"}
    assert found[2]["mark"] == {"value": 700.0, "label": "limit"}
    (lost,) = seen(Gpu(lost="lost: GPU is lost")).devices
    told = details(lost, 0.0, {}, "cuda:0", {"gpu/power"})["charts"]
    assert [chart["title"] for chart in told] == ["Power"], "what was seen before stays"
    bare = Gpu(info(memory_total=None), {"gpu/util": 3.0, "gpu/mem_used": 1.0 * GIB})
    assert [len(chart["lines"]) for chart in shown(bare)["charts"]] == [1, 1]
    for chart in found:
        colors = [line["color"] for line in chart["lines"]]
        assert len(set(colors)) == len(colors), chart["title"]


def test_history_goes_to_the_browser_in_columns() -> None:
    nothing = (None,) * (len(DRAWN) - 1)
    found = history([DeviceSample(10.04, (1.0, *nothing)), DeviceSample(11.0, (1 / 3, *nothing))])
    assert found["t"] == [10.0, 11.0]
    assert found["v"]["gpu/util"] == [1.0, 0.33333]
    assert found["v"]["gpu/power"] == [None, None]
    assert found["v"].keys() == set(DRAWN)


@pytest.mark.parametrize("gpu", [gpus(1)[0], divided()])
def test_signs_are_all_told(gpu: Gpu) -> None:
    assert [sign["level"] for sign in shown(gpu)["signs"]] == ["ok"]
    gpu.recovery = "reset this GPU"
    gpu.values["gpu/remapped_rows"] = 1.0
    assert [sign["level"] for sign in shown(gpu)["signs"]] == ["critical", "notice"]
