"""Our sampler over the simulator's NVML, through its C interface, in processes of their own.

What no GPU at hand shows on demand: refusals, lost GPUs, eight of them, MIG, WSL, old drivers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import Need
from tests.simulator.nvml_library import ask, build, no_header

MIB = 2**20
FIRST = "GPU-c0da5130-0000-4000-8000-000000000001"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, need: Need) -> Path:
    need(no_header())
    return build(tmp_path_factory.mktemp("nvml"))


SAMPLED = """
ticks(int(os.environ.get("TICKS", "120")))
values = {}
for uuid, row in recorder.devices:
    values.setdefault(uuid, {}).update(row)
missing = recorder.described("capabilities")[-1]["missing"]
tell(uuids=uuids, values=values, missing=missing, counts=counts(), events=recorder.events)
"""


def test_everything_that_a_gpu_tells_is_recorded(library: Path, tmp_path: Path) -> None:
    found = ask(
        library,
        tmp_path,
        SAMPLED,
        CUDASIM_NVML="fan 45;ecc 12 1;remapped 2 1 0 0;replays 9;nvlink_kib_s 2048;temperature 61;"
        "pcie_bytes 1e11",
    )
    values = found["values"][FIRST]
    assert values["gpu/fan"] == 45
    assert (values["gpu/ecc_corrected"], values["gpu/ecc_uncorrected"]) == (12, 1)
    assert (values["gpu/remapped_rows"], values["gpu/pcie_replays"]) == (3, 9)
    assert (values["gpu/temp"], values["gpu/temp_mem"], values["gpu/temp_margin"]) == (61, 67, 31)
    assert values["gpu/mem_reserved"] == 8 * MIB
    assert values["gpu/mem_others"] == 0
    assert values["gpu/nvlink_tx"] > 0
    assert set(found["missing"][FIRST]) == {
        f"gpu/{key}" for key in ("sm_active", "sm_occupancy", "tensor_active", "dram_active")
    }, "only what this GPU lacks"


REFUSALS = {
    "nvmlDeviceGetUtilizationRates": (3, "not supported on this GPU", "gpu/util"),
    "nvmlDeviceGetClockInfo": (4, "permission", "gpu/sm_clock"),
    "nvmlDeviceGetMarginTemperature": (13, "not offered by this driver", "gpu/temp_margin"),
    "nvmlDeviceGetTotalEccErrors": (3, "not supported on this GPU", "gpu/ecc_corrected"),
    "nvmlDeviceGetFieldValues": (4, "permission", "gpu/throttle_power"),
    "nvmlDeviceGetComputeRunningProcesses_v3": (4, "permission", "processes"),
}


@pytest.mark.parametrize("function", REFUSALS)
def test_a_refused_call_is_made_once_for_each_question(
    library: Path, tmp_path: Path, function: str
) -> None:
    code, reason, key = REFUSALS[function]
    found = ask(library, tmp_path, SAMPLED, CUDASIM_NVML=f"refuse {function} {code}", TICKS="240")
    assert found["missing"][FIRST][key] == reason
    assert key not in found["values"][FIRST]
    questions = {"nvmlDeviceGetClockInfo": 2, "nvmlDeviceGetTotalEccErrors": 2}
    questions |= {"nvmlDeviceGetFieldValues": 12}  # each field by itself, to learn what it takes
    assert found["counts"][function] <= questions.get(function, 1)
    assert "gpu/mem_used" in found["values"][FIRST]


MIG = """
(parent,) = source.devices()
instances = source.instances(parent.uuid)
rows = {info.uuid: source.read(info.uuid, *SamplingTier) for info in (parent, *instances)}
sampler.sample_only(instances[0].uuid, instances[0].name)
ticks(11)
facts = source.facts(instances[1].uuid)
tell(parent=parent.uuid, mig=parent.mig, name=parent.name,
     parent_facts=source.facts(parent.uuid).mig,
     instances=[(info.uuid, info.name, info.memory_total) for info in instances], rows=rows,
     parent_uuid=facts.parent_uuid, profile=facts.mig_profile, sampled=recorder.devices[0][0],
     processes={info.uuid: [one.pid for one in source.processes(info.uuid)]
                for info in (parent, *instances)},
     reasons=source.reasons(instances[0].uuid))
"""


def test_mig_instances_are_told_from_their_gpu(library: Path, tmp_path: Path) -> None:
    found = ask(
        library,
        tmp_path,
        MIG,
        CUDASIM_MIG="1",
        CUDASIM_DEVICES="2",
        CUDASIM_MEMORY="2G,3G",
        CUDASIM_NAME="NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        CUDASIM_NVML=f"@1 process {os.getpid()} 700",
    )
    (first, name, first_total), (second, _, second_total) = found["instances"]
    parent = found["parent"]
    assert (found["name"], name) == ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert parent.startswith("GPU-")
    assert first.startswith("MIG-")
    assert (first_total, second_total) == (2 * 2**30, 3 * 2**30)
    assert found["rows"][parent]["gpu/mem_total"] == 5 * 2**30
    assert found["rows"][first]["gpu/mem_used"] == 0
    assert found["rows"][second]["gpu/mem_used"] == 700 * MIB
    assert found["processes"] == {parent: [os.getpid()], first: [], second: [os.getpid()]}
    assert (found["parent_uuid"], found["profile"]) == (parent, "1g.10gb")
    assert (found["mig"], found["parent_facts"], found["sampled"]) == (True, True, first)
    assert "gpu/power" in found["rows"][parent]
    assert found["reasons"]["gpu/power"] == "not supported on this GPU"
    assert "gpu/util" not in found["rows"][parent]


WATCHED = """
from stepscope.gpu import nvml_device, xid
nvml_device.RETRY_S = 0.2
heard = []
steer("xid 31")  # before the registration: not told again
watch = xid.XidWatcher(source, heard.append)

def wait(number):
    until = time.monotonic() + 20
    while len(heard) < number and watch.reason(uuids[0]) is None and time.monotonic() < until:
        time.sleep(0.01)

while "nvmlEventSetWait_v2" not in counts() and watch.reason(uuids[0]) is None:
    time.sleep(0.01)
steer("xid 31", "@1 xid 79 3")
wait(1)
steer("xid 31", "@1 xid 79 3", "@0 lost")
wait(2)
time.sleep(0.5)
steer("xid 31", "@1 xid 79 3")
time.sleep(1.5)
steer("xid 31", "@1 xid 79 3", "@0 xid 48")
wait(3)
began = time.monotonic()
ended = watch.stop()
tell(heard=[[one.uuid, one.code, one.text] for one in heard],
     ended=ended, took=time.monotonic() - began, reason=watch.reason(uuids[0]), uuids=uuids)
"""


def test_errors_are_heard_also_after_a_gpu_was_lost(library: Path, tmp_path: Path) -> None:
    found = ask(
        library, tmp_path, WATCHED, CUDASIM_NVML=str(tmp_path / "steering"), CUDASIM_DEVICES="2"
    )
    first, second = found["uuids"]
    assert [one[:2] for one in found["heard"]] == [[second, 79], [first, 79], [first, 48]]
    assert found["heard"][0][2] == "Xid 79: the GPU has fallen off the bus"
    assert found["ended"]
    assert found["took"] < 2
