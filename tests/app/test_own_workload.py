"""A workload of the user's own on the page: offered where given, with its switches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.controls.sidebar import WORKLOADS
from trainer.config import Workload
from trainer.custom_workload import VARIABLE, choose

OpenPage = Callable[..., AppTest]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_workload.py"
OWN = WORKLOADS[Workload.CUSTOM]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


def said(app: AppTest) -> str:
    return "\n".join(caption.value for caption in app.sidebar.caption)


def test_it_is_offered_only_if_one_was_given(page: OpenPage) -> None:
    assert OWN not in page().sidebar.selectbox(key="config_workload").options
    choose(f"{EXAMPLE}:build")
    assert OWN in page().sidebar.selectbox(key="config_workload").options


def test_a_link_cannot_bring_one(page: OpenPage) -> None:
    app = page(workload="custom", custom_options="wide")
    # As code: in text the two hyphens would become one dash.
    assert "`streamlit run app.py -- --workload path.py:build`" in said(app)


def test_its_settings_are_switches_that_a_link_can_set(page: OpenPage) -> None:
    choose(f"{EXAMPLE}:build")
    app = page(workload="custom", custom_options="slow_loading")
    assert "own_workload.py:build" in said(app)
    switches = {each.label: each for each in app.sidebar.toggle}
    assert (switches["wide"].value, switches["slow_loading"].value) == (False, True)
    assert switches["wide"].help.startswith("Four times the hidden units")
    switches["wide"].set_value(True).run()
    assert not app.exception
    assert app.query_params["custom_options"] in ("slow_loading,wide", ["slow_loading,wide"])
    next(each for each in app.sidebar.toggle if each.label == "slow_loading").set_value(False).run()
    assert app.query_params["custom_options"] in ("wide", ["wide"])


def test_an_unknown_setting_in_a_link_is_named(page: OpenPage) -> None:
    choose(f"{EXAMPLE}:build")
    assert "the file has no option nothing; it has wide, slow_loading." in said(
        page(workload="custom", custom_options="nothing")
    )


def test_a_file_that_is_gone_is_told(page: OpenPage, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.touch()
    choose(f"{path}:build")
    path.unlink()
    assert "there is no file" in said(page(workload="custom"))
