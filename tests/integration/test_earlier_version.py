"""Run folders, links, checkpoints and sweeps that commit 0b52fe2 wrote: opened, listed, resumed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dashboard.run_index import RunIndex
from dashboard.sweep_content import to_content
from stepscope.lab.folder import read_plan, read_sweep, sweep_folders
from stepscope.run import RunStatus, read_run
from stepscope.run.setting_names import current_settings
from tests.support.run_values import events, metric, run_json
from trainer.config import RunConfig
from trainer.lab.plan import WorkloadPlan
from trainer.training.train import run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "0b52fe2"
LINKS: dict[str, dict[str, str]] = json.loads((FIXTURES / "links.json").read_text())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the folder of all runs."""
    return Path(shutil.copytree(FIXTURES / "runs", tmp_path / "runs"))


def shown(value: Any) -> str:
    """Return a setting as a link of that version has it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def run_json_file(folder: Path) -> dict[str, Any]:
    """Return run.json as that version wrote it."""
    written: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return written


def test_runs_are_listed_and_their_settings_read(root: Path) -> None:
    found = {run.folder.name: run.status for run in RunIndex(root).fresh().runs}
    assert found == {"plain": RunStatus.FINISHED, "fsdp": RunStatus.FINISHED}
    steps = read_run(root / "plain").run_json["step"], len(metric(root / "plain", "train/loss"))
    assert steps == (12, 12)
    for name in found:
        written = run_json_file(root / name)["config"]
        config = RunConfig.from_dict(written)
        assert {field: getattr(config, field) for field in written} == written


@pytest.mark.parametrize("name", LINKS)
def test_links_bring_their_settings_back(name: str) -> None:
    config, problems = RunConfig.from_params(LINKS[name])
    assert problems == []
    link = current_settings(LINKS[name])
    assert {field: shown(getattr(config, field)) for field in link} == link
    assert RunConfig.from_params(config.to_params()) == (config, [])


@pytest.mark.parametrize("name", ["plain", "fsdp"])
def test_checkpoints_are_resumed_on_one_device(root: Path, name: str) -> None:
    before = run_json_file(root / name)
    config = RunConfig.from_dict(
        {
            **before["config"],
            **{"parallel": "none", "ranks": 1, "runner": "process"},
            **{"max_steps": before["step"] + 2, "resume": f"{name}/last.pt"},
        }
    )
    (root / "resumed").mkdir()
    status = run(config, root / "resumed")
    assert status is RunStatus.FINISHED, run_json(root / "resumed")["reason"]
    assert run_json(root / "resumed")["first_step"] == before["step"]
    assert events(root / "resumed")[0].kind == "resumed"


def test_a_checkpoint_of_other_settings_is_refused(root: Path) -> None:
    config = RunConfig.from_dict(
        {**run_json_file(root / "plain")["config"], "width": 16, "resume": "plain/last.pt"}
    )
    (root / "resumed").mkdir()
    assert run(config, root / "resumed") is RunStatus.FAILED
    assert "width 8, got 16" in run_json(root / "resumed")["reason"]


def test_the_sweep_is_listed_and_its_plan_read(root: Path) -> None:
    (folder,) = sweep_folders(root)
    plan = WorkloadPlan.from_dict(read_plan(folder))
    written = read_plan(folder)["config"]
    assert {field: getattr(plan.config, field) for field in written} == written
    assert plan.warmup == 2
    content = to_content(read_sweep(folder))
    assert len(content.arms) == len(plan.arms) == 3
    for arm in plan.arms:
        replace(plan.config, **arm.changes)


def test_the_config_of_a_script_keeps_its_own_keys(root: Path) -> None:
    path = root / "plain" / "run.json"
    written = json.loads(path.read_text()) | {"kind": "script", "config": {"layers": 3}}
    path.write_text(json.dumps(written))
    assert read_run(root / "plain").run_json["config"] == {"layers": 3}
