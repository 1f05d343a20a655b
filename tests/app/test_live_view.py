"""The live page in every state, without a browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboard import services
from stepscope.run import RunStatus
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
)


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_empty_page_says_what_to_do_and_why_there_is_no_gpu(
    page: OpenPage, machine: Machine
) -> None:
    machine()
    app = page()
    assert "**Start run** in the sidebar" in text_of(app)
    assert NO_GPU in text_of(app)
    assert "stepscope watch train.py" in text_of(app)
    assert component(app)["run"] is None  # it looks out for runs, and draws no charts
    assert component(app)["layout"] is None
    assert start_refused(app) is None
    assert header(app)["buttons"] == []


def test_every_control_has_help(page: OpenPage) -> None:
    app = page(workload="memory_stress")
    widgets = [*app.button, *app.selectbox, *app.number_input, *app.toggle, *app.text_input]
    assert [widget.label for widget in widgets if not widget.help] == []


def test_a_finished_run_is_shown_with_its_status(page: OpenPage, server: services.Services) -> None:
    record(server.runs, "one")
    app = page(run="one")
    assert component(app)["run"] == "one"
    assert shown_run(app).startswith("digits_cnn · built-in · finished")
    assert header(app)["buttons"] == []


def test_a_failed_run_shows_its_traceback_as_text(
    page: OpenPage, server: services.Services
) -> None:
    folder = record(server.runs, "bad", RunStatus.FAILED)
    (folder / "traceback.txt").write_text("Traceback\n<script>boom</script>")
    app = page(run="bad", tab="logs")
    assert "Traceback\n<script>boom</script>" in [code.value for code in app.code]


@pytest.mark.parametrize("name", ["absent", "../etc", "corrupt"])
def test_an_unusable_run_is_refused_and_the_page_stays(
    page: OpenPage, server: services.Services, name: str
) -> None:
    (record(server.runs, "corrupt") / "run.json").write_text("{")
    app = page(run=name)
    assert component(app)["run"] is None
    assert header(app)["trouble"]
    if name == "absent":
        assert f"no run 'absent' in {server.runs}." in header(app)["trouble"]
    assert start_refused(app) is None


def test_a_hostile_link_is_reported_and_replaced(page: OpenPage) -> None:
    app = page(epochs="0", batch_size="9" * 50, workload="<b>", seed="7")
    warnings = " ".join(str(warning.value) for warning in app.warning)
    for name in ("epochs", "batch_size", "workload"):
        assert f"{name}:" in warnings
    assert label(app, "number_input", "Seed").value == 7


def test_the_url_follows_the_choice_and_brings_it_back(page: OpenPage) -> None:
    app = page()
    label(app, "number_input", "Batch size").set_value(32)
    label(app, "selectbox", "Workload")
    app.run()
    assert app.query_params["batch_size"] == "32"
    again = page(batch_size="32")
    assert label(again, "number_input", "Batch size").value == 32


def test_changing_the_workload_brings_its_defaults(page: OpenPage) -> None:
    app = page(seed="5")
    label(app, "selectbox", "Workload").select("linear").run()
    assert label(app, "selectbox", "Optimizer").value == "sgd"
    assert label(app, "number_input", "Seed").value == 5


def test_a_cpu_disables_what_needs_a_gpu_with_the_reason(page: OpenPage, machine: Machine) -> None:
    machine()
    app = page()
    assert label(app, "toggle", "pin_memory").disabled
    assert "pinned memory only speeds up" in label(app, "toggle", "pin_memory").help


def test_a_gpu_is_preselected_and_named_with_memory_and_uuid(
    page: OpenPage, machine: Machine
) -> None:
    machine(GPU)
    app = page()
    device = label(app, "selectbox", "Device")
    assert device.value == GPU.id
    assert device.options == ["cuda:0 · T4", "CPU"]
    assert f"NVIDIA T4 · 15.0\N{NO-BREAK SPACE}GiB `{GPU.id}`" in text_of(app)
    assert "tf32 needs compute capability 8.0" in label(app, "selectbox", "Precision").help
    assert not label(app, "toggle", "pin_memory").disabled
    device.select("cpu").run()
    assert app.query_params["device"] == "cpu"
    assert label(app, "toggle", "pin_memory").value is False


def test_a_link_to_another_machines_gpu_is_refused(page: OpenPage) -> None:
    app = page(device=GPU.id)
    assert "this machine" in text_of(app)
    assert "this machine" in str(start_refused(app))


def test_a_broken_torch_leaves_recorded_runs_readable(
    page: OpenPage, server: services.Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_name: str) -> None:
        raise ImportError("libtorch.so: cannot open")

    monkeypatch.setattr(services.importlib, "import_module", broken)
    second = services.Services(server.runs, server.examples)
    assert "libtorch.so" in str(second.devices().cuda_reason)
    monkeypatch.setattr(server, "devices", second.devices)
    record(server.runs, "one")
    app = page(run="one")
    assert component(app)["run"] == "one"
    assert "cannot run" in str(start_refused(app))


def test_a_second_start_is_refused_in_a_sentence(page: OpenPage, server: services.Services) -> None:
    first, second = page(epochs="5000"), page(epochs="5000")
    start_run(first)
    (run,) = server.list_runs()
    assert component(first)["run"] == run.id
    start_run(second)  # drawn before the first one began
    assert f"{run.id} is active" in str(start_refused(second))
    assert len(server.list_runs()) == 1
    second.run()
    assert header(second)["error"] is None  # said once


def test_a_folder_that_cannot_be_made_is_said(
    page: OpenPage, server: services.Services, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    server.runs = tmp_path / "file"
    app = page()
    start_run(app)
    assert "could not start" in header(app)["error"]["text"]


def test_resume_fills_the_sidebar(page: OpenPage, server: services.Services) -> None:
    folder = record(server.runs, "one")
    (folder / "last.pt").write_bytes(b"x")
    app = page(run="one", tab="details")
    label(app, "button", "Resume in a new run").click().run()
    assert not app.exception
    assert app.query_params["resume_from"] == "one/last.pt"


def test_a_folder_taken_away_during_the_run_leaves_the_page(
    page: OpenPage, server: services.Services
) -> None:
    app = page(epochs="5000")
    start_run(app)
    wait_for(lambda: server.list_runs()[0].status is RunStatus.RUNNING)
    folder = server.list_runs()[0].folder
    (folder / "run.json").unlink()
    for _ in range(20):  # the recorder may write it again meanwhile
        app.run()
        assert not app.exception
    server.close()


def test_start_takes_the_settings_that_were_changed_just_before(
    page: OpenPage, server: services.Services
) -> None:
    app = page(workload="linear", epochs="1")
    label(app, "selectbox", "Precision").select("bf16")  # and no time to draw the page with it
    start_run(app)
    (started,) = server.list_runs()
    assert started.run_json["config"]["precision"] == "bf16"
    assert header(app)["picked"] == started.id
    server.close()
