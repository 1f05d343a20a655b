"""The setting that a verdict proposes: from the page's component into the sidebar."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import services
from dashboard.controls.sidebar_groups import PLACES
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


def test_a_setting_of_another_run_leaves_all_others_as_they_are(
    page: OpenPage, server: services.Services
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


def test_a_setting_is_in_the_group_that_its_place_names(page: OpenPage) -> None:
    app = page(
        workload="digits_cnn", num_workers="1", strategy="ddp", gradient_accumulation_steps="2"
    )
    groups = {group.label.split(" · ")[0]: group for group in app.sidebar.expander}
    found = {
        widget.key.removeprefix("config_"): name
        for name, group in groups.items()
        for kind in ("toggle", "number_input", "selectbox")
        for widget in group.get(kind)
    }
    of_others = {"reshard_after_forward", "cpu_offload", "time_collectives", "runner"}
    assert found == {name: group for name, group in PLACES.items() if name not in of_others}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"field": "num_workers", "value": 1000}, "num_workers: must be between 0 and 64"),
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
