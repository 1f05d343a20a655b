"""The Run page of built-in runs in every state, without a browser."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dashboard import services
from stepscope.run import RunStatus
from stepscope.run.metadata import edit_notes
from tests.support.app_page import (
    GPU,
    NO_GPU,
    Machine,
    OpenPage,
    component,
    header,
    label,
    record,
    shown_run,
    start_refused,
    start_run,
    text_of,
    widget,
)
from tests.support.train_devices import SIMULATED
from tests.support.waiting import wait_until
from trainer.config import SETTINGS

BADGE = "are simulated"


def test_the_empty_page_shows_what_to_do_and_why_there_is_no_gpu(
    page: OpenPage, machine: Machine, server: services.Services
) -> None:
    machine()
    app = page()
    for text in (NO_GPU, str(server.runs)):
        assert text in text_of(app)
    [command] = [code.value for code in app.code if "watch" in code.value]
    variable, program, *words = shlex.split(command)
    assert variable == f"STEPSCOPE_RUNS={server.runs}"
    assert shutil.which(program), "the command works as it stands"
    assert words == ["watch", "train.py"]
    assert component(app)["run"] is component(app)["layout"] is start_refused(app) is None
    assert header(app)["buttons"] == []
    widgets = [*app.button, *app.selectbox, *app.number_input, *app.toggle, *app.text_input]
    assert [widget.label for widget in widgets if not widget.help] == []
    pinned = label(app, "toggle", "pin_memory")
    assert pinned.disabled


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["best.pt"], "best.pt"),
        (["step-200.pt", "last.pt", "step-1000.pt", "best.pt"], "step-1000.pt"),
    ],
)
def test_a_finished_run_is_resumed_from_its_newest_checkpoint_but_the_best(
    page: OpenPage, server: services.Services, names: list[str], taken: str
) -> None:
    folder = record(server.runs, "one")
    for age_s, name in enumerate(reversed(names)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    app = page(run="one", tab="details")
    assert component(app)["run"] == "one"
    assert shown_run(app).split(" · ")[0] == "digits_cnn"
    assert header(app)["buttons"] == []
    label(app, "button", "Resume in a new run").click().run()
    assert not app.exception
    assert app.query_params["resume_from"] == f"one/{taken}"
    assert f"one/{taken}" in app.success[0].value.replace("\\", "")


def test_the_note_of_a_run_is_the_edited_one(page: OpenPage, server: services.Services) -> None:
    edit_notes(record(server.runs, "one", note="uncorrected"), note="corrected")
    shown = text_of(page(run="one")).split()
    assert "corrected" in shown
    assert "uncorrected" not in shown


@pytest.mark.parametrize("name", ["absent", "../etc", "corrupt"])
def test_an_unreadable_run_is_refused_and_the_page_stays(
    page: OpenPage, server: services.Services, name: str
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
    page: OpenPage, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(SIMULATED)
    assert BADGE not in text_of(page()), "in a Python without the simulator"
    monkeypatch.setitem(sys.modules, "cudasim", sys)
    app = page()
    for view in ("runs", "lab", "hardware", "learn", "run"):
        app.switch_page(f"views/{view}.py").run()
        assert text_of(app).count(BADGE) == 1, view
    assert label(app, "selectbox", "Workload").value == "memory_stress"
    widget(app, "width").set_value(64).run()
    label(app, "button", "Reset to defaults").click().run()
    assert (widget(app, "width").value, widget(app, "image_size").value) == (8, 64)
    for workload in ("linear", "memory_stress"):
        widget(app, "workload").select(workload).run()
    assert (widget(app, "width").value, widget(app, "image_size").value) == (8, 64)
    assert app.query_params["width"] == "8"
    linked = page(workload="digits_cnn")
    assert linked.query_params["workload"] == "digits_cnn", "it survives a reload"
    assert widget(linked, "batch_size").value == 128
    machine()
    assert BADGE not in text_of(page())


@pytest.mark.parametrize("entry", [{"simulated": True}, {"simulated": "yes"}, "x"])
def test_a_run_on_simulated_gpus_has_the_badge_on_any_machine(
    page: OpenPage, machine: Machine, server: services.Services, entry: Any
) -> None:
    machine()
    record(server.runs, "one", devices=[entry])
    assert (BADGE in text_of(page(run="one"))) is (entry == {"simulated": True})


def test_a_gpu_is_preselected_named_and_limits_the_choices(
    page: OpenPage, machine: Machine
) -> None:
    machine(GPU)
    app = page()
    device = label(app, "selectbox", "Device")
    assert (device.value, device.options) == (GPU.id, ["cuda:0 · T4", "CPU"])
    assert f"`{GPU.id}`" in text_of(app)
    assert not label(app, "toggle", "pin_memory").disabled
    precision = label(app, "selectbox", "Precision")
    assert not {"tf32", "bf16 AMP"} & {*precision.options}


def test_a_broken_torch_or_folder_leaves_the_page(
    page: OpenPage, server: services.Services, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_name: str) -> None:
        raise ImportError("libtorch.so: cannot open")

    with monkeypatch.context() as patch:
        patch.setattr(services.importlib, "import_module", broken)
        second = services.Services(server.runs, server.examples)
        assert "libtorch.so" in str(second.devices().cuda_reason)
    with monkeypatch.context() as patch:
        patch.setattr(server, "devices", second.devices)
        record(server.runs, "one")
        app = page(run="one")
        assert component(app)["run"] == "one"
        assert start_refused(app) is not None
    server.runs = tmp_path / "one" / "run.json"  # no folder can be made there
    app = page()
    start_run(app)
    assert header(app)["error"]["text"]


def test_a_second_start_is_refused_and_the_run_may_lose_its_folder(
    page: OpenPage, server: services.Services
) -> None:
    first, second = page(epochs="5000"), page(epochs="5000")
    start_run(first)
    (run,) = server.run_list.fresh().runs
    assert component(first)["run"] == run.id
    start_run(second)  # drawn before the first one began
    assert run.id in str(start_refused(second))
    assert len(server.run_list.fresh().runs) == 1
    second.run()
    assert header(second)["error"] is None  # shown once
    wait_until(lambda: server.run_list.fresh().runs[0].status is RunStatus.RUNNING)
    (run.folder / "run.json").unlink()
    for _ in range(5):  # the recorder may write it again meanwhile
        first.run()
        assert not first.exception
