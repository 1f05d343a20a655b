"""The Run page of built-in runs in every state, without a browser."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest

from dashboard import services
from dashboard.services import Services
from tests.support.app_page import (
    GPU,
    Machine,
    OpenPage,
    at_address,
    component,
    header,
    label,
    record,
    start_refused,
    start_run,
    text_of,
    widget,
)
from tests.support.train_devices import SIMULATED
from trainer.config import SETTINGS

BADGE = "are simulated"


def test_the_empty_page_shows_what_to_do_and_why_there_is_no_gpu(
    page: OpenPage, machine: Machine, server: Services
) -> None:
    machine()
    app = page()
    [command] = [code.value for code in app.code if "watch" in code.value]
    variable, program, *words = shlex.split(command)
    assert variable == f"STEPSCOPE_RUNS={server.runs}"
    assert shutil.which(program), "the command works as it stands"
    assert words == ["watch", "train.py"]
    widgets = [*app.button, *app.selectbox, *app.number_input, *app.toggle, *app.text_input]
    assert [widget.label for widget in widgets if not widget.help] == []


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["best.pt"], "best.pt"),
        (["step-200.pt", "last.pt", "step-1000.pt", "best.pt"], "step-1000.pt"),
    ],
)
def test_a_finished_run_is_resumed_from_its_newest_checkpoint_but_the_best(
    page: OpenPage, server: Services, names: list[str], taken: str
) -> None:
    folder = record(server.runs, "one")
    for age_s, name in enumerate(reversed(names)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    app = page(run="one", tab="details")
    label(app, "button", "Resume in a new run").click().run()
    assert not app.exception
    assert app.query_params["resume_from"] == f"one/{taken}"


@pytest.mark.parametrize("name", ["absent", "../etc", "corrupt"])
def test_an_unreadable_run_is_refused_and_the_page_stays(
    page: OpenPage, server: Services, name: str
) -> None:
    (record(server.runs, "corrupt") / "run.json").write_text("{")
    app = page(run=name)
    assert component(app)["run"] is None
    assert header(app)["trouble"]
    assert start_refused(app) is None


def test_a_hostile_link_is_reported_and_replaced(page: OpenPage) -> None:
    app = page(epochs="0", batch_size="9" * 50, workload="<b>", seed="7", device=GPU.id)
    assert start_refused(app) is not None, "a GPU of another machine"
    warnings = " ".join(str(warning.value) for warning in app.warning)
    for name in ("epochs", "batch_size", "workload"):
        assert f"{SETTINGS[name].label} must be" in warnings
    assert label(app, "number_input", "Seed").value == 7


def test_simulated_gpus_have_a_badge_on_each_page_and_settings_that_move_memory(
    page: OpenPage, machine: Machine, server: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(SIMULATED)
    assert BADGE not in text_of(page()), "in a Python without the simulator"
    monkeypatch.setitem(sys.modules, "cudasim", sys)
    app = page()
    for view in ("runs", "lab", "hardware", "learn", "run"):
        app.switch_page(f"views/{view}.py").run()
        assert text_of(app).count(BADGE) == 1, view
    assert label(app, "selectbox", "Workload").value == "memory_stress"
    assert (widget(app, "width").value, widget(app, "image_size").value) == (8, 64)
    for workload in ("linear", "memory_stress"):
        widget(app, "workload").select(workload).run()
    assert (widget(app, "width").value, widget(app, "image_size").value) == (8, 64)
    machine()
    for simulated in (True, "yes"):
        record(server.runs, str(simulated), devices=[{"simulated": simulated}])
        assert (BADGE in text_of(page(run=str(simulated)))) is (simulated is True)


def test_a_gpu_is_preselected_named_and_limits_the_choices(
    page: OpenPage, machine: Machine
) -> None:
    machine(GPU)
    app = page()
    device = label(app, "selectbox", "Device")
    assert (device.value, device.options) == (GPU.id, ["cuda:0 · T4", "CPU"])
    assert not label(app, "toggle", "pin_memory").disabled
    precision = label(app, "selectbox", "Precision")
    assert not {"tf32", "bf16 AMP"} & {*precision.options}


def test_a_broken_torch_or_folder_leaves_the_page(
    page: OpenPage, server: Services, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_name: str) -> None:
        raise ImportError("libtorch.so: cannot open")

    with monkeypatch.context() as patch:
        patch.setattr(services.importlib, "import_module", broken)
        second = Services(server.runs, server.examples)
        assert "libtorch.so" in str(second.devices().cuda_reason)
    with monkeypatch.context() as patch:
        patch.setattr(server, "devices", second.devices)
        record(server.runs, "one")
        app = page(run="one")
        assert component(app)["run"] == "one"
        assert start_refused(app) is not None
        assert not at_address(page, "lab").exception  # shows recorded sweeps
    server.runs = tmp_path / "one" / "run.json"  # no folder can be made there
    app = page()
    start_run(app)
    assert header(app)["error"]["text"]


def test_a_second_start_is_refused(page: OpenPage, server: Services) -> None:
    first, second = page(epochs="5000"), page(epochs="5000")
    start_run(first)
    (run,) = server.run_list.fresh().runs
    start_run(second)  # drawn before the first one began
    assert run.id in str(start_refused(second))
    assert len(server.run_list.fresh().runs) == 1
    second.run()
