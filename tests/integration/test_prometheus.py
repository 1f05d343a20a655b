"""Prometheus accepts what we serve, the alert rules, and the queries of dashboard and docs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.child_process import ROOT

pytest.importorskip("prometheus_client")

from tests.support.grafana import FOLDER, targets
from tests.support.prometheus_text import OPENMETRICS, get
from tests.support.run_folders import make_run, make_store

RULES_TEST = ROOT / "tests" / "data" / "alerts_test.yml"

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no Prometheus: install Debian's prometheus package"
)


def chosen(expr: str) -> str:
    """Put in what Grafana does if all is chosen."""
    return re.sub(r"\$(job|instance|gpu|run)\b", ".+", expr.replace("$__rate_interval", "10s"))


def test_the_queries_of_dashboard_and_docs_are_promql(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    documented = re.findall(r"^```promql\n(.*?)^```", text, flags=re.M | re.S)
    assert len(documented) == 3
    queries = [chosen(query) for query in (*targets(), *documented)]
    rules = [{"record": f"query:{at}", "expr": query} for at, query in enumerate(queries)]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))  # JSON is YAML
    command = ["promtool", "check", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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
