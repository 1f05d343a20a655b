"""`stepscope exporter`: GPUs and live runs as Prometheus metrics, in both formats."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from stepscope.cli import main
from stepscope.export import prometheus
from stepscope.export.prometheus import ExporterCollector
from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.source import WITHOUT_GPU, NullSource, open_source
from stepscope.store import store_name
from tests.support.fake_machine import BUSY, GIB, FakeSource, Gpu, divided, gpus, machine
from tests.support.fake_machine import facts as facts_of
from tests.support.fake_nvml import FakeNvml, install
from tests.support.prometheus_text import Samples, get, scrape, serving
from tests.support.run_folders import Row, append_rows, make_run, make_store
from tests.support.waiting import wait_until

NO_GPU = NullSource(min(WITHOUT_GPU))


def exported(root: Path, source: Any = NO_GPU) -> Samples:
    with serving(ExporterCollector(root, machine(source))) as url:
        return scrape(url)


def one(found: Samples, name: str, **labels: str) -> float:
    """The value of the only series with these labels."""
    (value,) = (value for has, value in found[name] if labels.items() <= has.items())
    return value


def test_a_gpu_has_base_units_and_no_value_that_is_missing(tmp_path: Path) -> None:
    gpu = gpus(1)[0]
    gpu.values |= {"gpu/throttle_reasons": 0x24}
    gpu.missing["gpu/temp_mem"] = "not supported"
    found = exported(tmp_path, FakeSource([gpu]))
    uuid = gpu.info.uuid
    ((labels, value),) = found["gpu_info"]
    assert value == 1
    assert labels == {
        "uuid": uuid,
        "index": "0",
        "name": gpu.info.name,
        "driver": "580.95.05",
    }
    assert one(found, "gpu_utilization_ratio", uuid=uuid) == pytest.approx(0.97)
    assert one(found, "gpu_memory_used_bytes") == 40 * GIB
    assert one(found, "gpu_sm_clock_hertz") == 1.755e9
    assert one(found, "gpu_energy_joules_total") == BUSY["gpu/energy"]
    assert one(found, "gpu_throttle_seconds_total", reason="power_cap") == 10
    assert one(found, "gpu_temperature_slowdown_celsius") == 92
    active = {labels["reason"] for labels, value in found["gpu_throttled"] if value}
    assert active == {"power_cap", "thermal_software"}
    assert "gpu_memory_temperature_celsius" not in found
    assert "gpu_fan_speed_ratio" not in found
    assert one(found, "up", reader="gpus") == one(found, "gpu_up") == 1


def test_mig_instances_lost_gpus_and_a_machine_without_one(tmp_path: Path) -> None:
    lost = Gpu(facts=facts_of(gpus(2)[1].info), info=gpus(2)[1].info, lost="fell off the bus")
    found = exported(tmp_path, FakeSource([divided(), lost]))
    assert len(found["gpu_info"]) == 4
    assert one(found, "gpu_memory_used_bytes", uuid="MIG-00000001-0000-4000-8000-000000000000")
    assert one(found, "gpu_up", uuid=lost.info.uuid) == 0
    assert lost.info.uuid not in {labels["uuid"] for labels, _ in found["gpu_power_watts"]}
    found = exported(tmp_path)
    assert [labels["reader"] for labels, _ in found["up"]] == ["runs"]
    assert not [name for name in found if name.startswith("gpu_")]
    assert one(exported(tmp_path / "absent"), "up", reader="runs") == 0


@pytest.mark.parametrize("code", [0, 999])
def test_a_driver_that_does_not_start_is_0_unless_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    library = install(monkeypatch, FakeNvml())
    library.errors = {"nvmlInitWithFlags": code}
    with serving(ExporterCollector(tmp_path, MachineMonitor(open_source))) as url:
        up = [value for labels, value in scrape(url)["up"] if labels["reader"] == "gpus"]
    assert up == ([] if code == 0 else [0])


def test_a_driver_that_hangs_is_0_and_called_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "DRIVER_TIMEOUT_S", 0.05)
    source, calls, answer = FakeSource(gpus(1)), [0], threading.Event()

    def hang() -> None:
        calls[0] += 1
        answer.wait(20)

    source.before_read = hang
    with serving(ExporterCollector(tmp_path, machine(source))) as url:
        for _ in range(2):
            assert one(scrape(url), "up", reader="gpus") == 0
        assert calls == [1]
        answer.set()
        wait_until(lambda: not [t for t in threading.enumerate() if t.name == "stepscope-exporter"])
        monkeypatch.setattr(prometheus, "DRIVER_TIMEOUT_S", 20)
        assert one(scrape(url), "up", reader="gpus") == 1


def test_a_live_run_has_its_newest_values(tmp_path: Path) -> None:
    folder = make_run(
        tmp_path,
        host="a \n\"'\\ é" + "x" * 500,
        kind="init",
        device="GPU-x",
        step=7,
        slurm={"job_id": "4711"},
    )
    steps: list[Row] = [(1.0, 1, {"train/loss": 3.0, "val/accuracy": 50.0, "mine": 1.0})]
    steps += [(2.0 + n, 2 + n, {"train/loss": 2.0, "train/lr": None}) for n in range(700)]
    old, now = time.time() - 90, time.time()
    steps += [(old, 800, {"perf/step_time": 0.1, "perf/samples_per_sec": 9.0})]
    slow = make_run(tmp_path, "slow")
    paused: Row = (old, 1, {"perf/step_time": 40.0, "perf/samples_per_sec": 9.0})
    append_rows(slow, "steps", "", [paused])
    samples: list[Row] = [(old, 1, {"memory/allocated": 5.0}), (now, 1, {"process/rss": 6.0})]
    append_rows(folder, "steps", "", steps)
    append_rows(folder, "samples", "", samples)
    found = exported(tmp_path)
    (labels,) = (labels for labels, _ in found["run_info"] if labels["run"] == folder.name)
    host = labels.pop("host")
    assert host.startswith("a \n\"'\\ é")
    assert len(host) == prometheus.LABEL_LENGTH
    expected = {"kind": "init", "uuid": "GPU-x", "slurm_job_id": "4711"}
    assert labels == {"run": folder.name, "rank": "0"} | expected
    assert found["run_loss"] == [({"run": folder.name, "rank": "0"}, 2.0)]
    assert one(found, "run_validation_accuracy_ratio") == 0.5
    assert one(found, "run_steps_total", run=folder.name) == 7
    assert one(found, "run_process_resident_bytes") == 6
    assert "run_memory_allocated_bytes" not in found, "the sampler has not read it for 90 s"
    rates = {labels["run"]: value for labels, value in found["run_samples_per_second"]}
    assert rates == {slow.name: 9.0}, "the other run is paused or hung"
    assert not {"run_learning_rate", "run_planned_steps", "run_epoch"} & found.keys()
    beat = one(found, "run_heartbeat_timestamp_seconds", run=folder.name)
    assert beat == pytest.approx(time.time(), abs=60)
    assert not [name for name in found if "mine" in name]


def test_the_series_of_a_run_end_with_it(tmp_path: Path) -> None:
    make_run(tmp_path, "finished", status="finished")
    silent = make_run(tmp_path, "silent", heartbeat=1e9)  # stopped by a signal, for instance
    os.utime(silent / "run.json", (1e9, 1e9))
    gone = make_run(tmp_path, "gone", pid=2**22 + 1, step=3)
    broken = make_run(tmp_path, "broken")
    (broken / store_name(0)).write_bytes(b"no store" * 999)
    (make_run(tmp_path, "torn") / "run.json").write_text("{")
    live = make_run(tmp_path, "live", world_size=2)
    make_store(live)
    text = (gone / "run.json").read_text().replace("{", '{"rank": 1,', 1)
    (live / "rank1.json").write_text(text)
    found = exported(tmp_path)
    shown = {(live.name, "0"), (broken.name, "0")}
    crashed = {(gone.name, "0"), (live.name, "1")}
    assert ranks_of(found["run_info"]) == shown
    beats = ranks_of(found["run_heartbeat_timestamp_seconds"])
    assert shown | crashed <= beats, "an alert needs the last heartbeat of a crashed process"
    assert not ranks_of(found["run_steps_total"]) & crashed
    assert one(found, "run_loss", run=live.name) == 0.3


def ranks_of(series: list[tuple[dict[str, str], float]]) -> set[tuple[str, str]]:
    return {(labels["run"], labels["rank"]) for labels, _ in series}


def test_the_host_header(tmp_path: Path) -> None:
    with serving(ExporterCollector(tmp_path, machine(NO_GPU))) as url:
        port = url.rpartition(":")[2]
        for host in (f"localhost:{port}", "127.0.0.1", f"[::1]:{port}"):
            assert "stepscope_up" in get(f"{url}/metrics", Host=host)[1]
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(f"{url}/metrics", Host="evil.example")
        assert refused.value.code == 400
        refused.value.close()


def test_the_command_without_its_package_or_port(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with serving(ExporterCollector(tmp_path, machine(NO_GPU))) as url:
        assert main(["exporter", "--port", url.rpartition(":")[2]]) == 1
    assert os.strerror(errno.EADDRINUSE) in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "stepscope.export.prometheus")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["exporter"]) == 1
    assert "prometheus-client" in capsys.readouterr().err
