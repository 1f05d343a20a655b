"""The sidebar: every technique, reasons of unsupported ones, suggested settings, the link."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from dashboard.controls import config_widgets, sidebar
from dashboard.services import Services
from stepscope.common.config_issue import ConfigIssue
from tests.support.app_page import (
    GPU,
    Machine,
    OpenPage,
    header,
    label,
    record,
    start_refused,
    start_run,
    text_of,
    trigger,
    widget,
)
from trainer.config import SETTINGS, RunConfig
from trainer.lab.plan import LAB_SETTINGS
from trainer.training.config_validation import TrainDevice

NO = ConfigIssue("any", "this machine cannot", "Leave it")


def refuse(monkeypatch: pytest.MonkeyPatch, *refused: tuple[str, object]) -> None:
    """Make these values of these fields unsupported, and all others supported."""

    def problem(
        field: str, value: object, _config: RunConfig, _devices: Sequence[TrainDevice]
    ) -> ConfigIssue | None:
        return NO if (field, value) in refused else None

    monkeypatch.setattr(config_widgets, "choice_problem", problem)


def test_an_unsupported_technique_is_disabled_with_the_reason(
    page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"cuda_graphs": True, "num_workers": 1, "gradient_accumulation_steps": 2}
    refuse(monkeypatch, *values.items())
    app = page()
    of_workers = ("prefetch_factor", "persistent_workers")
    drawn = {name: widget(app, name) for name in LAB_SETTINGS if name not in of_workers}
    disabled = {field: found.help for field, found in drawn.items() if found.disabled}
    assert disabled.keys() == values.keys()
    assert all(NO.reason in text for text in disabled.values())


def test_an_unsupported_technique_that_is_on_can_be_turned_off(
    page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(
        monkeypatch, ("kernel_warmup", True), ("num_workers", 3), ("compile_mode", "max-autotune")
    )
    app = page(kernel_warmup="1", num_workers="3", compile_mode="max-autotune")
    for field, value in [("kernel_warmup", False), ("num_workers", 0), ("compile_mode", "none")]:
        assert not widget(app, field).disabled
        widget(app, field).set_value(value)
    app.run()
    assert widget(app, "compile_mode").options == ["Off", "default", "reduce-overhead"]


def test_numbers_out_of_range_are_shown_and_cannot_start(page: OpenPage) -> None:
    """Streamlit's own limits turn the field red, and Start trained with the value before."""
    app = page(workload="linear")
    wrong = {"learning_rate": -3.0, "epochs": 0, "batch_size": 10**8}
    for field, value in wrong.items():
        widget(app, field).set_value(value)
    app.run()
    assert {field: widget(app, field).value for field in wrong} == wrong
    assert text_of(app).count(":red[") == len(wrong)
    app.switch_page("views/runs.py").run()
    app.switch_page("views/run.py").run()
    assert all(f"{SETTINGS[field].label} must" in str(start_refused(app)) for field in wrong)


def test_a_group_names_its_differences_and_workers_bring_their_settings(page: OpenPage) -> None:
    app = page(workload="digits_mlp", cudnn_benchmark="1", compile_mode="default")
    label_of_group = app.sidebar.expander[1].label
    assert all(part in label_of_group for part in ("torch.compile", "cudnn.benchmark"))
    widget(app, "num_workers").set_value(2).run()
    assert not widget(app, "persistent_workers").disabled
    app.button(key="reset_settings").click().run()
    assert app.sidebar.expander[1].label == "Performance"


def test_another_device_resets_unsupported_settings(
    page: OpenPage, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_cpu(config: RunConfig, _devices: object) -> tuple[ConfigIssue, ...]:
        impossible = config.device == "cpu" and config.copy_stream
        return (ConfigIssue("copy_stream", "no copies", "Switch it off"),) if impossible else ()

    machine(GPU)
    monkeypatch.setattr(sidebar, "validate", on_cpu)
    app = page(copy_stream="1", kernel_warmup="1")
    label(app, "selectbox", "Device").select("cpu").run()
    values = {"copy_stream": False, "kernel_warmup": True}
    values |= dict.fromkeys(("pin_memory", "non_blocking"), False)
    assert {name: widget(app, name).value for name in values} == values


def test_another_workload_keeps_supported_settings_and_loads_its_defaults(page: OpenPage) -> None:
    given = {"gradient_accumulation_steps": 4, "max_steps": 9, "deterministic": 1, "seed": 5}
    app = page(**{name: str(value) for name, value in given.items()})
    assert widget(app, "channels_last").value is True
    label(app, "selectbox", "Workload").select("digits_mlp").run()
    assert {name: widget(app, name).value for name in given} == given
    assert widget(app, "channels_last").value is False


def test_values_survive_another_page_are_in_the_link_and_are_started(
    page: OpenPage, server: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch)
    app = page(workload="linear", epochs="1", max_steps="3", foreach="0")
    values = {"gradient_accumulation_steps": 4, "set_to_none": False, "batch_size": 48}
    for name, value in values.items():
        widget(app, name).set_value(value)
    app.run()
    app.query_params.clear()  # as a browser does on the way to another page
    for view in ("runs", "hardware", "learn", "run"):
        app.switch_page(f"views/{view}.py").run()
        assert not app.exception
    assert {name: widget(app, name).value for name in values} == values
    label(app, "selectbox", "Precision").select("bf16")  # and no time to draw the page with it
    start_run(app)
    (run,) = server.run_list.fresh().runs
    config = run.run_json["config"]
    assert {name: config[name] for name in values} == values
    assert (config["max_steps"], config["precision"]) == (3, "bf16")
    assert header(app)["picked"] == run.id


def test_a_suggested_setting_changes_nothing_else_and_an_invalid_one_nothing(
    page: OpenPage, server: Services
) -> None:
    """A recorded example brought its workload, and a GPU that this machine does not have."""
    folder = record(server.runs, "one")
    run_json = json.loads((folder / "run.json").read_text())
    run_json["config"] |= {"workload": "gpt", "device": "GPU-of-another", "batch_size": 48}
    (folder / "run.json").write_text(json.dumps(run_json))
    app = page(run="one", workload="digits_cnn", device="cpu")
    before = header(app)["settings"]
    trigger(app, "setting", {"field": "num_workers", "value": 3})
    assert header(app)["settings"] == before | {"num_workers": 3}
    wrong: list[tuple[Any, str]] = [
        ({"field": "device", "value": "cpu"}, "field:"),
        ("num_workers", "field:"),
        ({"field": "precision", "value": ["bf16"]}, "Precision must"),
    ]
    for wanted, error in wrong:
        trigger(app, "setting", wanted)
        assert header(app)["settings"] == before | {"num_workers": 3}
        assert error in header(app)["error"]["text"]
