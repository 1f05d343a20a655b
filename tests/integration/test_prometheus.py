"""A real Prometheus scrapes the exporter during a training; the dashboard's queries have data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_process import ROOT

pytest.importorskip("prometheus_client")

from stepscope.export.prometheus import ExporterCollector
from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.source import open_source
from stepscope.run import RunStatus
from stepscope.store.recorder import Recorder
from tests.support.fake_nvml import FakeGpu, FakeNvml, install
from tests.support.grafana import DASHBOARD, FOLDER, PANELS, targets
from tests.support.prometheus_text import OPENMETRICS, get, serving
from tests.support.run_folders import make_run, make_store
from tests.support.server import free_port
from tests.support.training_runs import background, small
from tests.support.waiting import wait_for
from trainer.config import Workload

UUID = "GPU-00000000-0000-4000-8000-000000000001"
RULES_TEST = ROOT / "tests" / "data" / "alerts_test.yml"

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus: install Debian's prometheus package"
)


@contextmanager
def prometheus(folder: Path, exporter: str) -> Iterator[str]:
    """Scrape an address every second, with our alert rules; yield Prometheus's address."""
    target = {"static_configs": [{"targets": [exporter.removeprefix("http://")]}]}
    scrapes = [{"job_name": "stepscope", **target}]
    times = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    rules = [str(FOLDER / "alerts.yml")]
    config = {"global": times, "rule_files": rules, "scrape_configs": scrapes}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://{address}"
        wait_for(lambda: "Ready" in get(f"{url}/-/ready")[1], 60)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, path: str, **query: str) -> Any:
    """Return the data of an answer of Prometheus's HTTP API; `match` is its match[]."""
    words = urllib.parse.urlencode({key.replace("match", "match[]"): query[key] for key in query})
    answer = json.loads(get(f"{url}/api/v1/{path}?{words}")[1])
    assert answer["status"] == "success", answer
    return answer["data"]


def values(url: str, expr: str) -> list[float]:
    found = ask(url, "query", query=expr)
    return [float(one["value"][1]) for one in found["result"]]


def chosen(expr: str) -> str:
    """Put in what Grafana does if all is chosen."""
    return re.sub(r"\$(job|instance|gpu|run)\b", ".+", expr.replace("$__rate_interval", "10s"))


@contextmanager
def recorded_on_gpu(folder: Path) -> Iterator[Recorder]:
    """A live run whose process trains on the simulated driver's GPU."""
    folder.mkdir()
    recorder = Recorder(folder, name="on a GPU")
    recorder.describe(device=UUID)
    recorder.set_status(RunStatus.RUNNING)
    try:
        yield recorder
    finally:
        recorder.close(RunStatus.FINISHED)


def test_every_query_has_data_while_a_run_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(UUID, reasons=0x4, used=20 * 2**30)
    install(monkeypatch, FakeNvml(gpu))
    runs = tmp_path / "runs"
    digits, other = runs / "digits", runs / "on-gpu"
    digits.mkdir(parents=True)
    config = small(Workload.DIGITS_CNN, epochs=1000, max_grad_norm=1.0)
    machine = MachineMonitor(lambda: open_source(reader="exporter"))
    collector = ExporterCollector(runs, machine)
    with (
        serving(collector) as url,
        prometheus(tmp_path, url) as server,
    ):
        empty = [*targets(), *documented()]
        with background(config, digits), recorded_on_gpu(other) as recorder:

            def answered() -> bool:
                recorder.log(recorder.step + 1, {"train/loss": 0.5})
                recorder.sample({f"memory/{key}": 7e9 for key in ("allocated", "reserved")})
                recorder.sample({"memory/peak_allocated": 8e9})
                gpu.energy_mj += 1000
                empty[:] = [expr for expr in empty if not values(server, chosen(expr))]
                return not empty

            try:
                wait_for(answered, 60)
            except AssertionError:
                pytest.fail(f"no data: {empty}\n{get(url + '/metrics')[1]}")
            check_answers(server)
        gone = 'stepscope_run_info{run="digits"}'
        wait_for(lambda: not values(server, gone), 30)
        assert values(server, "stepscope_gpu_power_watts") == [312.5], "the GPU is still there"


def documented() -> list[str]:
    """The queries of docs/integrations.md that need no other exporter."""
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    found = re.findall(r"^```promql\n(.*?)^```", text, flags=re.M | re.S)
    assert len(found) == 3
    return [query for query in found if "DCGM" not in query]


def check_answers(server: str) -> None:
    """Compare some values, the variables of the dashboard, targets and rules."""
    memory = next(one for one in PANELS if one["title"] == "GPU memory in use")
    assert values(server, chosen(memory["targets"][0]["expr"])) == [20 / 80]
    assert values(server, 'stepscope_run_memory_allocated_bytes{run="on-gpu"}') == [7e9]
    assert 0 < values(server, 'stepscope_run_loss{run="digits"}')[0] < 5
    known = {"job": ["stepscope"], "gpu": [UUID], "run": ["digits", "on-gpu"]}
    for variable in DASHBOARD["templating"]["list"][1:]:
        query = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert query is not None
        listed = ask(server, f"label/{query[2]}/values", match=chosen(query[1]))
        assert listed == known.get(variable["name"], listed) != []
    healthy = [one["health"] for one in ask(server, "targets")["activeTargets"]]
    assert healthy == ["up"]
    (group,) = ask(server, "rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []


def test_the_alert_rules_fire_when_they_should(tmp_path: Path) -> None:
    rules = shutil.copy(FOLDER / "alerts.yml", tmp_path)
    test = shutil.copy(RULES_TEST, tmp_path)
    for command in (["check", "rules", rules], ["test", "rules", test]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = set(re.findall(r"alertname: (\w+)\n", RULES_TEST.read_text(encoding="utf-8")))
    assert tested == set(re.findall(r"alert: (\w+)", Path(rules).read_text(encoding="utf-8")))


def test_the_command_serves_what_promtool_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path))
    make_store(make_run(tmp_path))
    command = [sys.executable, "-m", "stepscope.cli", "exporter", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as exporter:
        try:
            assert exporter.stdout is not None
            url = exporter.stdout.readline().split()[-1]
            text = get(url)[1]
            assert get(url, Accept=OPENMETRICS)[0].startswith("application/openmetrics-text")
        finally:
            exporter.terminate()
    assert "stepscope_run_loss{" in text
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
