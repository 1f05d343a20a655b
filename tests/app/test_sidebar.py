"""The sidebar's switches: all are there, what is impossible says why, and values survive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import services
from dashboard.controls import config_widgets, sidebar
from tests.support.app_page import GPU, Machine, label, text_of, trigger, widget
from trainer.config import Problem, RunConfig
from trainer.config_validation import TrainDevice
from trainer.techniques import SWITCHES

OpenPage = Callable[..., AppTest]
NO = Problem("any", "this machine cannot", "Leave it")


def refuse(monkeypatch: pytest.MonkeyPatch, *refused: tuple[str, object]) -> None:
    """Let these values of these fields be impossible, and all others possible."""

    def problem(
        field: str, value: object, _config: RunConfig, _devices: Sequence[TrainDevice]
    ) -> Problem | None:
        return NO if (field, value) in refused else None

    monkeypatch.setattr(config_widgets, "choice_problem", problem)


def test_each_switch_is_drawn_with_its_two_sentences(page: OpenPage) -> None:
    app = page()
    drawn = {switch.field: widget(app, switch.field) for switch in SWITCHES}
    assert {field: (found.label, found.help) for field, found in drawn.items()} == {
        switch.field: (switch.label, switch.help) for switch in SWITCHES
    }


def test_an_impossible_switch_is_disabled_with_the_reason(
    page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, ("cuda_graphs", True), ("num_workers", 1), ("accumulation", 2))
    app = page()
    assert {s.field for s in SWITCHES if widget(app, s.field).disabled} == {
        "cuda_graphs",
        "num_workers",
        "accumulation",
    }
    assert text_of(app).count("this machine cannot. Leave it.") == 3


def test_what_cannot_be_off_is_disabled_while_it_is_on(page: OpenPage) -> None:
    app = page()
    assert widget(app, "persistent_workers").disabled  # there are no workers
    assert "there are no workers to keep alive" in text_of(app)
    assert "Switch it on" not in text_of(app)
    widget(app, "num_workers").set_value(2).run()
    assert not widget(app, "persistent_workers").disabled
    widget(app, "persistent_workers").set_value(False).run()
    widget(app, "num_workers").set_value(0).run()
    assert not widget(app, "persistent_workers").disabled  # so that it can be switched back
    assert "Switch it on, or set num_workers above 0." in text_of(app)


def test_a_warm_up_of_the_learning_rate_is_disabled_with_plateau(page: OpenPage) -> None:
    app = page(workload="digits_mlp", lr_warmup_steps="5")
    assert widget(app, "lr_warmup_steps").value == 5
    widget(app, "schedule").set_value("plateau").run()
    assert not widget(app, "lr_warmup_steps").disabled  # so that it can be set to 0
    widget(app, "lr_warmup_steps").set_value(0).run()
    assert widget(app, "lr_warmup_steps").disabled


def test_what_is_on_and_impossible_can_be_switched_off(
    page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, ("warmup", True), ("num_workers", 3), ("compile", "max-autotune"))
    app = page(warmup="1", num_workers="3", compile="max-autotune")
    assert text_of(app).count("this machine cannot") == 3
    assert widget(app, "compile").value == "max-autotune"
    assert "max-autotune" in widget(app, "compile").options
    for field, value in [("warmup", False), ("num_workers", 0), ("compile", "none")]:
        assert not widget(app, field).disabled
        widget(app, field).set_value(value)
    app.run()
    assert widget(app, "compile").options == ["Off", "default", "reduce-overhead"]
    assert widget(app, "warmup").disabled


def test_one_reason_for_several_kinds_is_said_once(page: OpenPage, machine: Machine) -> None:
    machine(GPU)
    refused = [line for line in text_of(page()).split(":material/block:") if "7.5" in line]
    assert any(line.lstrip().startswith("tf32 needs") for line in refused)
    assert "bf16 AMP" not in widget(page(), "precision").options


def test_another_device_takes_back_what_it_cannot_do(
    page: OpenPage, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_cpu(config: RunConfig, _devices: object) -> tuple[Problem, ...]:
        impossible = config.device == "cpu" and config.copy_stream
        return (Problem("copy_stream", "no copies", "Switch it off"),) if impossible else ()

    machine(GPU)
    monkeypatch.setattr(sidebar, "problems", on_cpu)
    app = page(copy_stream="1", warmup="1")
    label(app, "selectbox", "Device").select("cpu").run()
    assert widget(app, "copy_stream").value is False
    assert widget(app, "warmup").value is True
    assert widget(app, "pin_memory").value is False


def test_another_workload_keeps_the_switches_that_it_can_use(page: OpenPage) -> None:
    app = page(accumulation="4", max_steps="9", deterministic="1", activation_checkpointing="1")
    assert widget(app, "channels_last").value is True
    label(app, "selectbox", "Workload").select("digits_mlp").run()
    assert widget(app, "accumulation").value == 4
    assert widget(app, "max_steps").value == 9
    assert widget(app, "deterministic").value is True
    assert widget(app, "channels_last").value is False
    assert widget(app, "activation_checkpointing").value is False  # of no use in two layers


def test_values_survive_another_page_and_are_in_the_link(
    page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch)
    app = page()
    widget(app, "accumulation").set_value(4)
    widget(app, "set_to_none").set_value(False)
    widget(app, "compile").set_value("reduce-overhead")
    app.run()
    wanted = {"accumulation": "4", "set_to_none": "0", "compile": "reduce-overhead"}
    for field, value in wanted.items():
        assert app.query_params[field] == value
    app.switch_page("views/runs.py").run()
    app.switch_page("views/live.py").run()
    assert not app.exception
    assert widget(app, "accumulation").value == 4
    assert widget(app, "set_to_none").value is False
    assert widget(app, "compile").value == "reduce-overhead"


def test_start_takes_the_switches(page: OpenPage, server: services.Services) -> None:
    app = page(workload="linear", epochs="1", max_steps="3", accumulation="2", foreach="0")
    widget(app, "set_to_none").set_value(False)
    trigger(app, "start")
    (run,) = server.list_runs()
    config = run.run_json["config"]
    assert (config["max_steps"], config["accumulation"]) == (3, 2)
    assert config["set_to_none"] is False
