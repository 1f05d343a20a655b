"""The sidebar's switches: all are there, what is impossible says why, and values survive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import services
from dashboard.controls import config_widgets, sidebar
from tests.support.app_page import GPU, Machine, label, start_refused, start_run, text_of, widget
from trainer.config import ConfigIssue, RunConfig
from trainer.config_validation import TrainDevice
from trainer.techniques import SWITCHES

OpenPage = Callable[..., AppTest]
NO = ConfigIssue("any", "this machine cannot", "Leave it")


def refuse(monkeypatch: pytest.MonkeyPatch, *refused: tuple[str, object]) -> None:
    """Let these values of these fields be impossible, and all others possible."""

    def problem(
        field: str, value: object, _config: RunConfig, _devices: Sequence[TrainDevice]
    ) -> ConfigIssue | None:
        return NO if (field, value) in refused else None

    monkeypatch.setattr(config_widgets, "choice_problem", problem)


def test_each_switch_is_drawn_with_its_two_sentences(page: OpenPage) -> None:
    app = page(num_workers="1")
    drawn = {switch.field: widget(app, switch.field) for switch in SWITCHES}
    for switch in SWITCHES:
        found = drawn[switch.field]
        assert found.label == switch.label
        assert found.help.startswith(switch.help)


def test_an_impossible_switch_is_disabled_with_the_reason(
    page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(
        monkeypatch, ("cuda_graphs", True), ("num_workers", 1), ("gradient_accumulation_steps", 2)
    )
    app = page()
    of_workers = ("prefetch_factor", "persistent_workers")
    drawn = {s.field: widget(app, s.field) for s in SWITCHES if s.field not in of_workers}
    disabled = {field: found.help for field, found in drawn.items() if found.disabled}
    assert disabled.keys() == {"cuda_graphs", "num_workers", "gradient_accumulation_steps"}
    assert all(text.endswith("Disabled: this machine cannot.") for text in disabled.values())
    assert "this machine cannot" not in text_of(app), "a reason that blocks nothing is a tooltip"


def test_settings_of_workers_appear_with_workers(page: OpenPage) -> None:
    app = page()
    assert not [one for one in app.toggle if one.key == "config_persistent_workers"]
    widget(app, "num_workers").set_value(2).run()
    assert not widget(app, "persistent_workers").disabled
    assert widget(app, "prefetch_factor").value == 2


@pytest.mark.parametrize(
    ("field", "value"), [("learning_rate", -3.0), ("epochs", 0), ("batch_size", 10**8)]
)
def test_a_number_out_of_range_is_shown_and_cannot_start(
    page: OpenPage, field: str, value: float
) -> None:
    """Streamlit's own limits turn the field red, and Start trained with the value before."""
    app = page(workload="linear")
    widget(app, field).set_value(value).run()
    assert widget(app, field).value == value
    assert ":red[" in text_of(app)
    assert f"{field}: must be between" in str(start_refused(app))
    app.switch_page("views/runs.py").run()
    app.switch_page("views/run.py").run()
    assert f"{field}: must be between" in str(start_refused(app))


def test_a_group_names_what_differs_from_the_defaults(page: OpenPage) -> None:
    app = page(workload="digits_mlp", cudnn_benchmark="1", compile_mode="default")
    labels = [group.label for group in app.sidebar.expander]
    assert labels[0] == "Training"
    assert labels[1] == "Performance · torch.compile default, cudnn.benchmark on"
    app.button(key="reset_settings").click().run()
    assert app.sidebar.expander[1].label == "Performance"


def test_a_warm_up_of_the_learning_rate_is_disabled_with_plateau(page: OpenPage) -> None:
    app = page(workload="digits_mlp", lr_warmup_steps="5")
    assert widget(app, "lr_warmup_steps").value == 5
    widget(app, "lr_scheduler").set_value("plateau").run()
    assert not widget(app, "lr_warmup_steps").disabled  # so that it can be set to 0
    widget(app, "lr_warmup_steps").set_value(0).run()
    assert widget(app, "lr_warmup_steps").disabled


def test_what_is_on_and_impossible_can_be_switched_off(
    page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(
        monkeypatch, ("kernel_warmup", True), ("num_workers", 3), ("compile_mode", "max-autotune")
    )
    app = page(kernel_warmup="1", num_workers="3", compile_mode="max-autotune")
    assert text_of(app).count("this machine cannot") == 3
    assert widget(app, "compile_mode").value == "max-autotune"
    assert "max-autotune" in widget(app, "compile_mode").options
    for field, value in [("kernel_warmup", False), ("num_workers", 0), ("compile_mode", "none")]:
        assert not widget(app, field).disabled
        widget(app, field).set_value(value)
    app.run()
    assert widget(app, "compile_mode").options == ["Off", "default", "reduce-overhead"]
    assert widget(app, "kernel_warmup").disabled


def test_kinds_that_are_missing_are_one_line_with_reasons_as_help(
    page: OpenPage, machine: Machine
) -> None:
    machine(GPU)
    app = page()
    found = widget(app, "precision")
    assert "bf16 AMP" not in found.options
    assert "- tf32" in found.help
    assert "7.5" in found.help
    [line] = [one.value for one in app.caption if one.value.startswith("Not available on")]
    assert line.startswith("Not available on this device: tf32, bf16 AMP")


def test_another_device_takes_back_what_it_cannot_do(
    page: OpenPage, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_cpu(config: RunConfig, _devices: object) -> tuple[ConfigIssue, ...]:
        impossible = config.device == "cpu" and config.copy_stream
        return (ConfigIssue("copy_stream", "no copies", "Switch it off"),) if impossible else ()

    machine(GPU)
    monkeypatch.setattr(sidebar, "validate", on_cpu)
    app = page(copy_stream="1", kernel_warmup="1")
    label(app, "selectbox", "Device").select("cpu").run()
    assert widget(app, "copy_stream").value is False
    assert widget(app, "kernel_warmup").value is True
    assert widget(app, "pin_memory").value is False


def test_another_workload_keeps_the_switches_that_it_can_use(page: OpenPage) -> None:
    app = page(
        gradient_accumulation_steps="4",
        max_steps="9",
        deterministic="1",
        activation_checkpointing="1",
    )
    assert widget(app, "channels_last").value is True
    label(app, "selectbox", "Workload").select("digits_mlp").run()
    assert widget(app, "gradient_accumulation_steps").value == 4
    assert widget(app, "max_steps").value == 9
    assert widget(app, "deterministic").value is True
    assert widget(app, "channels_last").value is False
    assert widget(app, "activation_checkpointing").value is False  # of no use in two layers


def test_values_survive_another_page_and_are_in_the_link(
    page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch)
    app = page()
    widget(app, "gradient_accumulation_steps").set_value(4)
    widget(app, "set_to_none").set_value(False)
    widget(app, "compile_mode").set_value("reduce-overhead")
    app.run()
    wanted = {
        "gradient_accumulation_steps": "4",
        "set_to_none": "0",
        "compile_mode": "reduce-overhead",
    }
    for field, value in wanted.items():
        assert app.query_params[field] == value
    app.switch_page("views/runs.py").run()
    app.switch_page("views/run.py").run()
    assert not app.exception
    assert widget(app, "gradient_accumulation_steps").value == 4
    assert widget(app, "set_to_none").value is False
    assert widget(app, "compile_mode").value == "reduce-overhead"


def test_start_takes_the_switches(page: OpenPage, server: services.Services) -> None:
    app = page(
        workload="linear", epochs="1", max_steps="3", gradient_accumulation_steps="2", foreach="0"
    )
    widget(app, "set_to_none").set_value(False)
    start_run(app)
    (run,) = server.list_runs()
    config = run.run_json["config"]
    assert (config["max_steps"], config["gradient_accumulation_steps"]) == (3, 2)
    assert config["set_to_none"] is False
