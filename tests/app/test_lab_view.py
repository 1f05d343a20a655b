"""The lab page in every state, without a browser and without measuring."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.format import escape_markdown
from dashboard.services import ServerActivity, Services
from dashboard.sweeps import Sweeps
from stepscope.lab.folder import SweepError
from stepscope.run import process_identity, user_name
from tests.support.app_page import (
    Machine,
    OpenPage,
    at_address,
    label,
    start_refused,
    text_of,
    widget,
)
from tests.support.fake_sweep import BEST, sweep
from tests.support.train_devices import SIMULATED
from trainer.lab.plan import WorkloadPlan

ID = "20261122-061500-digits-mlp-ab12"


def store(root: Path, content: dict[str, Any], sweep_id: str = ID, **others: Any) -> Path:
    folder = root / "lab" / sweep_id
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(content["plan"]))
    owner = {"host": socket.gethostname(), "user": user_name()}
    (folder / "sweep.json").write_text(json.dumps(owner | content | others))
    return folder


@pytest.fixture
def lab(page: OpenPage) -> OpenPage:
    def open_it(**params: str) -> AppTest:
        app = page(**params)
        app.switch_page("views/lab.py").run()
        assert not app.exception
        return app

    return open_it


@pytest.fixture
def started(server: Services, monkeypatch: pytest.MonkeyPatch) -> list[WorkloadPlan]:
    """The plans that the page starts, instead of a process."""
    plans: list[WorkloadPlan] = []

    def start(plan: WorkloadPlan) -> str:
        plans.append(plan)
        return store(server.runs, sweep(), f"started-{len(plans)}").name

    monkeypatch.setattr(server.sweeps, "start", start)
    return plans


def labels(app: AppTest) -> set[str]:
    return {button.label for button in app.button}


def test_a_tick_has_an_estimate_and_start_takes_it(
    lab: OpenPage, started: list[WorkloadPlan]
) -> None:
    app = lab()
    label(app, "selectbox", "Workload").select("digits_mlp").run()
    label(app, "number_input", "Steps per trial").set_value(20)
    label(app, "checkbox", "bf16 AMP").check().run()
    label(app, "button", "Start sweep").click().run()
    (plan,) = started
    assert [variant.changes for variant in plan.variants] == [{"precision": "bf16"}]
    assert (plan.config.workload, plan.steps) == ("digits_mlp", 20)
    assert label(app, "selectbox", "Sweep").value == "started-1"


def test_a_reload_restores_the_selection_and_an_invalid_address_changes_nothing(
    page: OpenPage,
) -> None:
    address = {
        "lab_variant_precision=bf16": "true",
        "lab_variant_num_workers=2": "true",
    }
    reloaded = at_address(page, "lab", **address)
    checked = [box.label for box in reloaded.checkbox if box.value]
    assert sorted(checked) == ["bf16 AMP", "num_workers 2"]
    invalid = {"lab_preset": "<b>", "lab_variant_precision=bf17": "true"}
    app = at_address(page, "lab", **invalid)
    assert [box.label for box in app.checkbox if box.value] == []


def test_the_speed_of_a_simulated_gpu_is_not_measured(lab: OpenPage, machine: Machine) -> None:
    machine(SIMULATED)
    app = lab()
    label(app, "checkbox", "deterministic on").check().run()
    assert label(app, "button", "Start sweep").disabled
    label(app, "selectbox", "Device").select("cpu").run()
    label(app, "checkbox", "bf16 AMP").check().run()
    assert not label(app, "button", "Start sweep").disabled


def test_a_preset_ticks_its_settings_and_unsupported_ones_are_disabled(
    lab: OpenPage, started: list[WorkloadPlan], machine: Machine
) -> None:
    machine()
    app = lab()
    pills = label(app, "button_group", "Preset")
    pills.set_value("precision").run()
    assert label(app, "checkbox", "bf16 AMP").value
    assert not any(box.label == "tf32" for box in app.checkbox)
    assert "pure fp16 needs a GPU" in text_of(app)
    label(app, "checkbox", "fp16 AMP").uncheck().run()
    label(app, "button", "Start sweep").click().run()
    assert "precision=bf16" in {variant.name for variant in started[0].variants}
    label(app, "button_group", "Preset").set_value(None).run()  # a second press
    assert not any(box.value for box in app.checkbox)


def test_the_sidebar_is_the_baseline_also_after_another_page(
    lab: OpenPage, started: list[WorkloadPlan]
) -> None:
    app = lab(workload="digits_mlp", batch_size="64", resume_from="x.pt")
    label(app, "selectbox", "Workload").select("linear").run()
    label(app, "checkbox", "bf16 AMP").check().run()
    for view in ("runs", "run", "lab"):
        app.switch_page(f"views/{view}.py").run()
        assert not app.exception
    assert label(app, "selectbox", "Workload").value == "linear"
    widget(app, "batch_size").set_value(0).run()
    assert label(app, "button", "Start sweep").disabled
    widget(app, "batch_size").set_value(48).run()
    label(app, "button", "Start sweep").click().run()
    config = started[0].config
    assert (config.workload, config.batch_size, config.resume_from) == ("linear", 48, "")
    assert app.query_params["workload"] in ("linear", ["linear"])


def test_a_finished_sweep_has_chart_table_and_best_settings_to_apply(
    lab: OpenPage, server: Services
) -> None:
    best = BEST | {"changes": {"precision": "bf16", "optimizer_impl": "for-loop"}}
    store(server.runs, sweep(best=best, throttled="power cap in 3 of 40 trials."))
    app = lab()
    [table] = app.dataframe
    assert list(table.value.columns)[:3] == ["Setting", "Verdict", "Loss verdict"]
    assert {"Stop", "Resume"}.isdisjoint(labels(app))
    assert "power cap" in app.warning[0].value
    widgets = [*app.button, *app.selectbox, *app.number_input, *app.checkbox, *app.radio]
    assert [one.label for one in widgets if not one.help and not one.disabled] == []
    label(app, "button", "Apply settings").click().run()
    assert not app.exception
    assert label(app, "selectbox", "Precision").value == "bf16"
    (told,) = app.success
    assert "compile on" in told.value
    app.run()
    assert not app.success  # said once


@pytest.mark.parametrize(
    ("verdict", "loss", "usable"),
    [
        ("faster", "same", True),
        ("faster", "worse", False),
        ("faster", "not_shown_equal", True),
    ],
)
def test_the_confirmation_and_the_loss_decide(
    lab: OpenPage, server: Services, verdict: str, loss: str, usable: bool
) -> None:
    change = {"verdict": verdict, "loss": {"verdict": loss, "text": "a loss [1, 2]"}}
    store(server.runs, sweep("stopped", best=BEST | change))
    app = lab()
    assert label(app, "button", "Apply settings").disabled is not usable
    assert escape_markdown(BEST["text"]) in text_of(app)


def test_there_may_be_no_best_combination_and_a_foreign_one_is_validated(
    lab: OpenPage, server: Services
) -> None:
    tried = [{"tried": ["compile"], "kept": False, "reason": "its loss is worse"}]
    folder = store(server.runs, sweep(best=None, combining=tried))
    app = lab()
    assert "Apply settings" not in labels(app)
    shutil.rmtree(folder)
    store(server.runs, sweep(best=BEST | {"changes": {"batch_size": 10**9}}))
    app = lab()
    label(app, "button", "Apply settings").click().run()
    assert not app.exception
    assert len(app.error) == 1
    assert not app.success


def test_a_running_sweep_blocks_the_start(lab: OpenPage, server: Services, page: OpenPage) -> None:
    identity = process_identity()  # ours: it lives
    store(server.runs, sweep("running", updated=time.time() + 3, **identity))
    app = lab()
    assert start_refused(app, "Start sweep") == server.busy_reason(ServerActivity.SWEEP)
    assert not label(app, "button", "Start sweep").help, "it would open under the pointer"
    (bar,) = app.get("progress")
    assert bar.proto.value == int(100 * 17 / 96)
    assert start_refused(page()) == server.busy_reason(ServerActivity.RUN) is not None


def test_a_killed_sweep_resumes_unless_a_run_is_active_or_it_is_of_another_host(
    lab: OpenPage, server: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store(server.runs, sweep("running", **process_identity() | {"pid": 2**22 + 1}))
    app = lab()
    assert len(app.warning) == 1, "its process is gone"
    assert not label(app, "button", "Resume").disabled
    assert server.busy_reason(ServerActivity.SWEEP) is None
    with monkeypatch.context() as patch:
        patch.setattr(server, "active_id", lambda: "some-run")
        app.run()
        assert "some-run" in str(start_refused(app, "Start sweep"))
        assert label(app, "button", "Resume").disabled
        assert "some-run" in label(app, "button", "Resume").help
    shutil.rmtree(folder)
    store(server.runs, sweep("stopped", host="elsewhere"))
    app = lab()
    assert label(app, "button", "Resume").disabled
    assert "elsewhere" in label(app, "button", "Resume").help
    assert "Delete" not in labels(app)


def test_a_link_opens_its_sweep_and_a_deleted_one_shows_the_next(
    lab: OpenPage, page: OpenPage, server: Services
) -> None:
    store(server.runs, sweep(), "20261101-000000-a-1")
    folder = store(server.runs, sweep())
    app, other = lab(), at_address(page, "lab", sweep=ID)
    assert label(app, "selectbox", "Sweep").value == ID
    linked = at_address(page, "lab", sweep="20261101-000000-a-1")
    assert label(linked, "selectbox", "Sweep").value == "20261101-000000-a-1"
    label(other, "button", "Delete").click().run()
    assert not other.exception
    assert not folder.exists()
    assert label(other, "selectbox", "Sweep").value == "20261101-000000-a-1"
    app.run()
    assert ID in app.warning[0].value
    assert label(app, "selectbox", "Sweep").value == "20261101-000000-a-1"


def test_an_empty_lab_has_an_example(
    lab: OpenPage, server: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path / "examples", sweep(best=BEST), "cpu-sweep", host="example", user="example")
    monkeypatch.setattr(server, "sweeps", Sweeps(server.runs, tmp_path / "examples"))
    app = lab()
    app.button(key="lab_open_cpu-sweep").click().run()
    assert len(app.dataframe) == 1
    assert "Delete" not in labels(app)


def test_a_sweep_over_a_script_is_shown_and_resumed_in_a_terminal(
    lab: OpenPage, server: Services
) -> None:
    found = sweep("stopped", best=BEST, workload="train", machine={"torch": "2.13.0"})
    plan = {name: value for name, value in found["plan"].items() if name != "config"}
    store(server.runs, found | {"plan": {**plan, "script": {"target": "train.py"}}})
    app = lab()
    assert len(app.warning) == 1, "it has stopped"
    assert "Resume" not in labels(app)
    assert any(code.value.endswith("stepscope tune train.py") for code in app.code)
    with pytest.raises(SweepError):
        server.sweeps.resume(server.sweeps.list_sweeps()[0].id)


PATCH = {
    "diff": "--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-Adam(p)\n+Adam(p, fused=True)\n",
    "by_hand": [{"setting": "num_workers=4", "lines": ["DataLoader(num_workers=4)"], "where": "x"}],
}


@pytest.mark.parametrize("content", [PATCH, {"diff": 3}])
def test_a_patch_is_shown_or_its_file_is_named(
    lab: OpenPage, server: Services, content: Any
) -> None:
    folder = store(server.runs, sweep(best=BEST, workload="train"))
    (folder / "patch.json").write_text(json.dumps(content))
    app = lab()
    codes = [one.value for one in app.code if not one.value.startswith("STEPSCOPE_RUNS=")]
    if content is PATCH:
        assert codes == [PATCH["diff"].strip(), "DataLoader(num_workers=4)"]
    else:
        assert codes == []
        assert any("patch" in one.value for one in app.error)
