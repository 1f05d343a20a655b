"""The health of a GPU: every rule and their order."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.gpu.health import XID_NEW_S, health
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
    return XidEvent("GPU-1", code, f"Xid {code}: words", level, age_s=age_s)


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
        ({THROTTLE: 0x40}, WARNING, f"Clocks lowered now by hardware thermal slowdown{HOT}"),
        ({THROTTLE: 0xA0}, WARNING, "Clocks lowered now by software thermal slowdown and power b"),
        ({THROTTLE: 4}, OK, "Working."),  # normal at full load
        ({THROTTLE: 4, LIMIT: 300.0}, NOTICE, "Capped by a power limit of 300 W below its default"),
        ({ECC: 2.0}, WARNING, "2 uncorrected memory errors since the driver"),
        ({ROWS: 3.0, "gpu/remap_pending": 1.0}, WARNING, "Bad memory rows are pending remap;"),
        ({"gpu/remap_pending": 1.0, "gpu/remap_failed": 1.0}, CRITICAL, "A bad memory row could"),
        (
            {"xids": (FELL_OFF, NEW)},
            CRITICAL,
            "Xid 79: words, 5 s ago (2 in all). See https://docs.nvidia.com/",
        ),
        ({"xids": (OLD,)}, OK, "Working."),
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


def test_missing_readings_and_thresholds() -> None:
    assert health(of(values=IDLE, facts=FACTS)).text == "Idle."
    assert health(of()) == DeviceHealth(OK, "No problems found.")
    assert health(of(values=without(BUSY, "gpu/mem_total"))).level is OK


def test_the_worst_sign_is_the_line_and_of_a_lost_gpu_the_only_one() -> None:
    values = {THROTTLE: 0x44, USED: 79.0 * GIB, "gpu/remap_failed": 1.0}
    found = judged(values)
    assert [issue.level for issue in found.issues] == [CRITICAL, WARNING, NOTICE]
    assert found.text == found.issues[0].text
    lost = judged(values, lost="lost: GPU is lost")
    assert (lost.level, lost.text) == (CRITICAL, "Lost: GPU is lost. Retrying.")
    assert len(lost.issues) == 1
