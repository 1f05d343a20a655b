"""The setting that a verdict proposes: from the page's component into the sidebar."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import services
from dashboard.verdicts import PLACES
from tests.support.app_page import component, header, record, trigger

OpenPage = Callable[..., AppTest]


def test_a_proposal_sets_the_sidebar_and_the_link(page: OpenPage) -> None:
    app = page()
    assert header(app)["settings"]["num_workers"] == 0
    trigger(app, "setting", {"field": "num_workers", "value": 3})
    assert header(app)["settings"]["num_workers"] == 3
    assert app.number_input(key="config_num_workers").value == 3
    assert app.query_params["num_workers"] == "3"
    assert component(app)["header"]["error"] is None


def test_it_takes_over_the_settings_of_a_run_that_the_sidebar_does_not_describe(
    page: OpenPage, server: services.Services
) -> None:
    folder = record(server.runs, "one")
    run_json = json.loads((folder / "run.json").read_text())
    run_json["config"] |= {"workload": "gpt", "device": "cpu", "batch_size": 48}
    (folder / "run.json").write_text(json.dumps(run_json))
    app = page(run="one", workload="digits_cnn", device="cpu", num_workers="3")
    # As nothing is set for a run of that workload, the browser offers the setting.
    assert header(app)["settings"] is None
    trigger(app, "setting", {"field": "num_workers", "value": 3})
    told = header(app)["settings"]
    assert (told["workload"], told["batch_size"], told["num_workers"]) == ("gpt", 48, 3)
    # From now on the sidebar is for that run: what else is set in it stays.
    app.number_input(key="config_batch_size").set_value(96).run()
    trigger(app, "setting", {"field": "pin_memory", "value": False})
    assert header(app)["settings"]["batch_size"] == 96


def test_a_setting_is_in_the_group_that_its_place_names(page: OpenPage) -> None:
    app = page(workload="digits_cnn")
    groups = {group.label: group for group in app.sidebar.expander}
    for name, place in PLACES.items():
        group, _, said = place.partition(", ")
        widgets = {
            widget.key: widget.label
            for kind in ("toggle", "number_input", "selectbox")
            for widget in groups[group].get(kind)
        }
        assert f"config_{name}" in widgets
        assert not said or widgets[f"config_{name}"] == said


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"field": "num_workers", "value": 1000}, "num_workers: must be 0 to 64"),
        ({"field": "device", "value": "cpu"}, "field: unknown setting"),
        ({"field": "__class__", "value": 1}, "field: unknown setting"),
        ("num_workers", "field: unknown setting"),
        ({"field": "precision", "value": ["bf16"]}, "precision: must be"),
    ],
)
def test_what_is_no_setting_is_refused_in_a_sentence(
    page: OpenPage, wanted: Any, said: str
) -> None:
    app = page()
    before = header(app)["settings"]
    trigger(app, "setting", wanted)
    told = header(app)
    assert told["settings"] == before
    assert said in told["error"]["text"]
