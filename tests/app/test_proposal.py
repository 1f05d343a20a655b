"""The setting that a verdict proposes: from the page's component into the sidebar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from tests.app.test_live_view import component, header, trigger

OpenPage = Callable[..., AppTest]


def test_a_proposal_sets_the_sidebar_and_the_link(page: OpenPage) -> None:
    app = page()
    assert header(app)["settings"]["num_workers"] == 0
    trigger(app, "setting", {"field": "num_workers", "value": 3})
    assert header(app)["settings"]["num_workers"] == 3
    assert app.number_input(key="config_num_workers").value == 3
    assert app.query_params["num_workers"] == "3"
    assert component(app)["header"]["error"] is None


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"field": "num_workers", "value": 1000}, "num_workers: must be 0 to 64"),
        ({"field": "device", "value": "cpu"}, "field: must be a setting"),
        ({"field": "__class__", "value": 1}, "field: must be a setting"),
        ("num_workers", "field: must be a setting"),
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
