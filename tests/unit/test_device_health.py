"""The health of a GPU, every rule and their order; how long clocks were lowered, by reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepscope.gpu.device_events import REASONS, throttle_text, throttle_times
from stepscope.gpu.device_info import DeviceProperties
from stepscope.gpu.health import XID_NEW_S, health, is_link_slow
from stepscope.gpu.machine_state import DeviceHealth, DeviceState, HealthStatus, XidEvent
from tests.support.fake_machine import BUSY, GIB, IDLE, facts, info, process, without

FACTS = facts(info())
OK, NOTICE, WARNING, CRITICAL = HealthStatus


def of(**known: Any) -> DeviceState:
    return DeviceState(**{"info": info(), "facts": None, **known})


def judged(values: dict[str, Any] | None = None, **evidence: Any) -> DeviceHealth:
    """The health of a GPU at work, with these readings in place of its own."""
    known = {key: value for key, value in (BUSY | (values or {})).items() if value is not None}
    return health(of(values=known, **{"facts": FACTS, **evidence}))


def xid(code: int, level: HealthStatus, age_s: float) -> XidEvent:
    return XidEvent("GPU-1", code, f"Xid {code}: words", level, None, age_s=age_s)


SLOW = replace(FACTS, pcie_gen=1, pcie_width=8)
FELL_OFF, OLD, NEW = xid(79, CRITICAL, 5.0), xid(79, CRITICAL, XID_NEW_S), xid(31, WARNING, 1.0)
DEAD = process(77, state="zombie", memory=2 * GIB)
HOT = ": 61 °C, slowdown at 92 °C."
ECC, LIMIT, USED = "gpu/ecc_uncorrected", "gpu/power_limit", "gpu/mem_used"

THROTTLE, ROWS = "gpu/throttle_reasons", "gpu/remapped_rows"
TEMP, MARGIN = "gpu/temp", "gpu/temp_margin"


@pytest.mark.parametrize(
    ("case", "level", "text"),
    [
        ({}, OK, "Working."),
        ({"recovery": "it has to be reset"}, CRITICAL, "Driver: it has to be reset."),
        ({THROTTLE: 0x40}, WARNING, f"Thermal throttling now, by the hardware{HOT}"),
        ({THROTTLE: 0x20}, WARNING, f"Thermal throttling now, by the driver{HOT}"),
        ({THROTTLE: 0x08}, WARNING, f"Hardware slowdown now, for heat or power{HOT}"),
        ({THROTTLE: 0x88}, WARNING, "Power brake active: the machine's power"),
        ({THROTTLE: 4}, OK, "Working. At its power limit of 700 W: normal at full load."),
        ({THROTTLE: 4, "gpu/util": 40.0}, OK, "Working. Clocks are capped by the power limit of"),
        ({THROTTLE: 4, LIMIT: 300.0}, NOTICE, "Capped by a power limit of 300 W below its default"),
        ({ECC: 2.0, "first": {ECC: 2.0}}, WARNING, "2 uncorrected memory errors since the driver"),
        ({ECC: 3.0, "first": {ECC: 2.0}}, CRITICAL, "1 uncorrected memory error while being"),
        ({ROWS: 3.0, "gpu/remap_pending": 1.0}, WARNING, "Bad memory rows are pending remap;"),
        ({"gpu/remap_pending": 1.0, "gpu/remap_failed": 1.0}, CRITICAL, "A bad memory row could"),
        (
            {"xids": (FELL_OFF, NEW)},
            CRITICAL,
            "Xid 79: words, 5 s ago (2 in all). See https://docs.nvidia.com/",
        ),
        ({"xids": (OLD,)}, NOTICE, "Xid 79: words, 10 min 00 s ago"),
        ({"facts": SLOW, "is_link_slow": True}, WARNING, "PCIe link at gen 1 ×8 under load,"),
        ({"facts": SLOW}, OK, "Working."),
        ({USED: 75.8 * GIB}, NOTICE, "Memory nearly full"),
        ({"processes": (DEAD, process())}, WARNING, "1 dead process still on the GPU: 77 (python"),
        ({TEMP: 88.0, MARGIN: None}, NOTICE, "Hot: 88 °C, 4 °C below its slowdown."),
        ({TEMP: 70.0, MARGIN: 5.0}, NOTICE, "Hot: 70 °C"),
        ({TEMP: 91.0, MARGIN: 20.0}, OK, "Working."),  # its own margin counts
    ],
)
def test_every_rule(case: dict[str, Any], level: HealthStatus, text: str) -> None:
    values = {key: value for key, value in case.items() if key.startswith("gpu/")}
    found = judged(values, **{key: case[key] for key in case.keys() - values})
    assert found.level is level
    assert found.text.startswith(text)


@pytest.mark.parametrize(
    ("facts", "util", "is_slow"),
    [
        (SLOW, 98.0, True),
        (replace(FACTS, pcie_width=8), 98.0, True),
        (SLOW, 3.0, False),
    ],
)
def test_a_link_is_slow_below_its_maximum_under_load(
    facts: DeviceProperties, util: float, is_slow: bool
) -> None:
    assert is_link_slow(facts, {"gpu/util": util}) is is_slow


def test_missing_readings_and_thresholds() -> None:
    assert health(of(values=IDLE, facts=FACTS)).text == "Idle."
    assert health(of()) == DeviceHealth(OK, "No problems found.")
    assert health(of(values=without(BUSY, "gpu/mem_total"))).level is OK


def test_the_worst_sign_is_the_line_and_of_a_lost_gpu_the_only_one() -> None:
    values = {THROTTLE: 0x44, USED: 79.0 * GIB, ECC: 1.0}
    found = judged(values, first={ECC: 0.0})
    assert [issue.level for issue in found.issues] == [CRITICAL, WARNING, NOTICE, OK]
    assert found.text == found.issues[0].text
    lost = judged(values, lost="lost: GPU is lost", recovery="reset")
    assert (lost.level, lost.text) == (CRITICAL, "Lost: GPU is lost. Retrying.")
    assert len(lost.issues) == 1


NOTHING = dict.fromkeys(REASONS, 5.0)


def test_throttle_times_are_differences() -> None:
    after = NOTHING | {"gpu/throttle_hw_thermal": 17.0, "gpu/throttle_power": 305.0}
    times = throttle_times(NOTHING, after)
    assert list(times.values()) == [12.0, 0.0, 0.0, 300.0]
    text = throttle_text(times, 600.0)
    assert "12 s (2%) thermal slowdown" in text
    assert "5 min 00 s (50%) power-limited" in text
    reset = throttle_times({"gpu/throttle_brake": 100.0}, {"gpu/throttle_brake": 0.5})
    assert reset == {"gpu/throttle_brake": 0.5}, "since the driver was loaded again"


def test_nothing_lowered_and_nothing_known_are_two_things() -> None:
    assert throttle_text(throttle_times(NOTHING, NOTHING), 60.0) == "Not throttled in 1 min 00 s."
    for before, after in ((NOTHING, {}), ({}, NOTHING)):
        assert "does not report" in throttle_text(throttle_times(before, after), 60.0)
