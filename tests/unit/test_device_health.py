"""The line of health of a GPU: every rule, and which of several is the line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepscope.gpu.health import (
    LINK_LOOKS,
    TELLTALES,
    XID_NEW_S,
    DeviceHealth,
    HealthInputs,
    HealthStatus,
    XidRecord,
    health,
)
from tests.support.fake_machine import BUSY, GIB, IDLE, facts, info, process, without

FACTS = facts(info())


def judged(values: dict[str, float] | None = None, **evidence: Any) -> DeviceHealth:
    """The health of a GPU at work, with these readings in place of its own."""
    return health(HealthInputs(values=BUSY | (values or {}), **{"facts": FACTS, **evidence}))


def test_a_gpu_without_trouble_says_what_it_does() -> None:
    assert judged() == DeviceHealth(HealthStatus.OK, "Working.")
    assert health(HealthInputs(values=IDLE, facts=FACTS)).text == "Idle."
    assert health(HealthInputs(values=without(BUSY, "gpu/util"))).text == "No problems found."
    assert health(HealthInputs()) == DeviceHealth(HealthStatus.OK, "No problems found.")


def test_without_any_sensor_it_does_not_claim_to_know() -> None:
    missing = dict.fromkeys(TELLTALES, "permission")
    found = health(HealthInputs(values=without(BUSY, *TELLTALES), missing=missing))
    assert found.text == "Working. Its sensors cannot be read here: permission."
    some = dict.fromkeys(TELLTALES[1:], "permission")
    assert health(HealthInputs(values=BUSY, missing=some)).text == "Working."


def test_a_lost_gpu_says_only_that() -> None:
    found = judged({"gpu/throttle_reasons": 0x40}, lost="lost: GPU is lost", recovery="reset")
    assert (found.level, found.text) == (HealthStatus.CRITICAL, "Lost: GPU is lost. Retrying.")
    assert len(found.signs) == 1


def test_the_drivers_own_advice_comes_first() -> None:
    found = judged({"gpu/throttle_reasons": 0x40}, recovery="the GPU has to be reset")
    assert (found.level, found.text) == (HealthStatus.CRITICAL, "Driver: the GPU has to be reset.")
    assert [sign.level for sign in found.signs] == [HealthStatus.CRITICAL, HealthStatus.WARNING]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0x40, "Thermal throttling now, by the hardware: 61 °C, slowdown at 92 °C."),
        (0x20, "Thermal throttling now, by the driver: 61 °C, slowdown at 92 °C."),
        (0x60, "Thermal throttling now, by the hardware: 61 °C, slowdown at 92 °C."),
        (0x08, "Hardware slowdown now, for heat or power: 61 °C, slowdown at 92 °C."),
        (0x48, "Thermal throttling now, by the hardware: 61 °C, slowdown at 92 °C."),
        (0x88, "Power brake active: the machine's power supply or cooling requests it."),
    ],
)
def test_a_gpu_that_is_slowed_now_names_the_reason(mask: int, words: str) -> None:
    found = judged({"gpu/throttle_reasons": mask})
    assert (found.level, found.text) == (HealthStatus.WARNING, words)


def test_heat_without_a_temperature_or_a_threshold_is_still_heat() -> None:
    hot = without(BUSY, "gpu/temp", "gpu/temp_margin") | {"gpu/throttle_reasons": 0x20}
    assert health(HealthInputs(values=hot)).text == "Thermal throttling now, by the driver."


@pytest.mark.parametrize(
    ("temperature", "margin", "text"),
    [
        (88.0, None, "Hot: 88 °C, 4 °C below its slowdown."),
        (92.0, None, "Hot: 92 °C, at its slowdown."),
        (70.0, 5.0, "Hot: 70 °C, 5 °C below its slowdown."),  # its own margin counts
        (91.0, 20.0, "Working."),
        (86.9, None, "Working."),
    ],
)
def test_a_gpu_near_its_own_slowdown_is_hot(
    temperature: float, margin: float | None, text: str
) -> None:
    values = without(BUSY, "gpu/temp_margin") | {"gpu/temp": temperature}
    if margin is not None:
        values["gpu/temp_margin"] = margin
    found = health(HealthInputs(values=values, facts=FACTS))
    assert found.text == text
    assert (found.level is HealthStatus.NOTICE) == text.startswith("Hot")


def test_without_a_threshold_no_temperature_is_called_hot() -> None:
    values = without(BUSY, "gpu/temp_margin") | {"gpu/temp": 91.0}
    assert health(HealthInputs(values=values)).level is HealthStatus.OK


def test_a_power_cap_at_full_load_is_normal_and_said_so() -> None:
    found = judged({"gpu/throttle_reasons": 0x04})
    assert (found.level, found.text) == (
        HealthStatus.OK,
        "Working. At its power limit of 700 W: normal at full load.",
    )
    half = judged({"gpu/throttle_reasons": 0x04, "gpu/util": 40.0})
    assert half.text == "Working. Clocks are capped by the power limit of 700 W."


def test_a_power_limit_below_the_gpus_own_is_worth_knowing() -> None:
    found = judged({"gpu/throttle_reasons": 0x04, "gpu/power_limit": 300.0})
    assert (found.level, found.text) == (
        HealthStatus.NOTICE,
        "Capped by a power limit of 300 W below its default 700 W.",
    )
    unheld = judged({"gpu/power_limit": 300.0})
    assert unheld.level is HealthStatus.OK


def test_uncorrected_errors_are_worse_while_one_looks() -> None:
    old = judged({"gpu/ecc_uncorrected": 2.0}, first={"gpu/ecc_uncorrected": 2.0})
    assert (old.level, old.text) == (
        HealthStatus.WARNING,
        "2 uncorrected memory errors since the driver was loaded, none while being watched.",
    )
    new = judged({"gpu/ecc_uncorrected": 3.0}, first={"gpu/ecc_uncorrected": 2.0})
    assert new.level is HealthStatus.CRITICAL
    assert new.text.startswith("1 uncorrected memory error while being watched: results may")


def test_remapped_rows_are_repaired_rows() -> None:
    one = judged({"gpu/remapped_rows": 1.0})
    assert (one.level, one.text) == (
        HealthStatus.NOTICE,
        "1 row of memory is remapped to spare rows.",
    )
    assert "3 rows of memory are" in judged({"gpu/remapped_rows": 3.0}).text


def test_rows_that_are_not_replaced_yet_or_cannot_be_are_trouble() -> None:
    pending = judged({"gpu/remapped_rows": 3.0, "gpu/remap_pending": 1.0})
    assert pending.level is HealthStatus.WARNING
    assert pending.text.endswith(
        "Bad memory rows are pending remap; takes effect after a GPU reset."
    )
    failed = judged({"gpu/remap_pending": 1.0, "gpu/remap_failed": 1.0})
    assert (
        failed.level,
        "A bad memory row could not be remapped: contact the GPU vendor." in failed.text,
    ) == (HealthStatus.CRITICAL, True)


def xid(
    code: int, level: HealthStatus, age_s: float, advice: str = "Restart the machine."
) -> XidRecord:
    return XidRecord(code, f"Xid {code}: words", advice, level, age_s)


def test_an_xid_is_as_bad_as_its_advice_and_the_worst_is_told() -> None:
    gpu, program = (
        xid(79, HealthStatus.CRITICAL, 5.0),
        xid(31, HealthStatus.WARNING, 3.0, "Restart the program."),
    )
    found = judged(xids=(gpu,))
    assert (found.level, found.text) == (
        HealthStatus.CRITICAL,
        "Xid 79: words, 5 s ago. Restart the machine.",
    )
    assert judged(xids=(program,)).level is HealthStatus.WARNING
    both = judged(xids=(gpu, program))
    assert (both.level, both.text) == (
        HealthStatus.CRITICAL,
        "Xid 79: words, 5 s ago (2 in all). Restart the machine.",
    )


def test_an_old_xid_is_history() -> None:
    old = xid(79, HealthStatus.CRITICAL, XID_NEW_S)
    found = judged(xids=(old,))
    assert (found.level, found.text[:27]) == (HealthStatus.NOTICE, "Xid 79: words, 10 min 00 s ")
    newer = judged(xids=(old, xid(31, HealthStatus.WARNING, 1.0)))
    assert (newer.level, newer.text[:6]) == (HealthStatus.WARNING, "Xid 31")


def test_a_link_below_its_maximum_counts_only_under_load() -> None:
    slow = replace(FACTS, pcie_gen=1, pcie_width=8)
    found = judged(facts=slow, slow_links=LINK_LOOKS)
    assert (found.level, found.text) == (
        HealthStatus.WARNING,
        "PCIe link at gen 1 ×8 under load, but capable of gen 5 ×16: copies take longer.",
    )
    assert judged(facts=replace(FACTS, pcie_width=8), slow_links=9).level is HealthStatus.WARNING
    assert judged({"gpu/util": 3.0}, facts=slow, slow_links=9).level is HealthStatus.OK
    unknown = replace(FACTS, pcie_gen=None, pcie_width=None)
    assert judged(facts=unknown, slow_links=9).level is HealthStatus.OK
    assert judged(facts=slow, slow_links=LINK_LOOKS - 1).level is HealthStatus.OK, (
        "it may speed up yet"
    )


def test_memory_that_is_nearly_full() -> None:
    found = judged({"gpu/mem_used": 78.0 * GIB})
    assert (found.level, found.text) == (
        HealthStatus.NOTICE,
        "Memory nearly full: 1.50 GiB of 80.0 GiB free.",
    )
    assert judged({"gpu/mem_used": 75.0 * GIB}).level is HealthStatus.OK
    kept_back = judged({"gpu/mem_used": 75.8 * GIB})
    assert kept_back.level is HealthStatus.NOTICE, "what the driver keeps cannot be used"
    assert health(HealthInputs(values=without(BUSY, "gpu/mem_total"))).level is HealthStatus.OK


def test_a_zombie_that_holds_memory() -> None:
    dead = process(77, state="zombie", memory=2 * GIB)
    found = judged(processes=(dead, process()))
    assert (found.level, found.text) == (
        HealthStatus.WARNING,
        "A dead process still holds 2.00 GiB of memory: 77 (python). Kill its parent.",
    )
    four = tuple(process(pid, state="zombie", memory=None) for pid in range(1, 5))
    assert judged(processes=four).text == (
        "4 ended processes hold memory: 1 (python), 2 (python), 3 (python) and 1 "
        "more. Kill its parent."
    )


def test_a_process_that_cannot_be_seen_from_here_is_not_called_a_zombie() -> None:
    found = judged(processes=(process(77, state="gone", memory=GIB),))
    assert found.level is HealthStatus.NOTICE
    assert found.text == (
        "A process not visible from here (ended, or in another container) holds 1.00 "
        "GiB of memory: 77 (python)."
    )


def test_the_worst_sign_is_the_line_and_the_others_are_kept() -> None:
    found = judged(
        {"gpu/throttle_reasons": 0x44, "gpu/mem_used": 79.0 * GIB, "gpu/ecc_uncorrected": 1.0},
        first={"gpu/ecc_uncorrected": 0.0},
    )
    assert [sign.level for sign in found.signs] == [
        HealthStatus.CRITICAL,
        HealthStatus.WARNING,
        HealthStatus.NOTICE,
        HealthStatus.OK,
    ]
    assert found.text == found.signs[0].text
