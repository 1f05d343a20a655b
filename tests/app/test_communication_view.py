"""The Collectives tab: refusals with reasons, a real measurement, files to compare."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import services
from stepscope.run import RunError
from tests.support.app_page import GPU, Machine, label, text_of
from tests.support.collectives_results import DOCUMENT, ROW
from trainer.collectives.measurement import new_result_path, read_result, result_names, write_result


@pytest.fixture
def communication(page: Callable[..., AppTest]) -> Callable[[], AppTest]:
    """Open the page."""

    def opened() -> AppTest:
        app = page()
        app.query_params["tab"] = "collectives"
        app.switch_page("views/hardware.py").run()
        assert not app.exception
        return app

    return opened


def test_nothing_measured_says_what_to_press(
    communication: Callable[[], AppTest], machine: Machine
) -> None:
    machine()
    app = communication()
    assert "Nothing has been measured yet. Press **Measure**." in [one.value for one in app.info]
    assert label(app, "selectbox", "Backend").value == "gloo"
    for kind, name in (
        ("selectbox", "Backend"),
        ("number_input", "Ranks"),
        ("selectbox", "Largest size"),
        ("button", "Measure"),
    ):
        assert label(app, kind, name).help
    label(app, "selectbox", "Backend").select("nccl").run()
    assert label(app, "button", "Measure").disabled
    assert "NCCL needs a GPU for each of the 2 ranks; found 0. torch" in text_of(app)


def test_with_two_gpus_nccl_is_offered_and_more_ranks_are_refused(
    communication: Callable[[], AppTest], machine: Machine
) -> None:
    machine(GPU, replace(GPU, id="GPU-other", cuda_index=1))
    app = communication()
    assert label(app, "selectbox", "Backend").value == "nccl"
    assert label(app, "number_input", "Ranks").value == 2
    assert not label(app, "button", "Measure").disabled
    label(app, "number_input", "Ranks").set_value(3).run()
    assert "a GPU for each of the 3 ranks; found 2" in text_of(app)


def test_it_measures_keeps_and_shows(
    communication: Callable[[], AppTest], machine: Machine, server: services.Services
) -> None:
    machine()
    app = communication()
    label(app, "selectbox", "Largest size").select(2**20).run()
    label(app, "button", "Measure").click().run()
    assert label(app, "button", "Stop").help
    with pytest.raises(RunError, match="A measurement of collectives is running"):
        server.begin(services.ServerActivity.COLLECTIVES, lambda: None)
    assert "Hardware page" in str(server.busy_reason(services.ServerActivity.LESSON))
    until = time.monotonic() + 90
    while server.collectives.running() is not None:
        assert time.monotonic() < until
        time.sleep(0.1)
    app.run()
    assert not app.exception
    [name] = result_names(server.runs)
    assert label(app, "selectbox", "Measurement").value == name
    assert [row["bytes"] for row in read_result(server.runs, name)["rows"]][-1] == 2**20
    assert "2 ranks by gloo on" in text_of(app)
    assert server.busy_reason(services.ServerActivity.LESSON) is None


def test_kept_ones_are_compared_and_a_broken_one_is_said(
    communication: Callable[[], AppTest], machine: Machine, server: services.Services
) -> None:
    machine()
    for _ in range(2):
        write_result(new_result_path(server.runs, "nccl", 8), DOCUMENT)
    first, second = result_names(server.runs)
    app = communication()
    assert "8 ranks by nccl on H100, 18 NVLinks" in text_of(app)
    assert label(app, "selectbox", "Measurement").options == [first, second]
    label(app, "selectbox", "Compare with").select(second).run()
    assert not app.exception
    for text, said in (
        ("{", "cannot be read"),
        (json.dumps(DOCUMENT | {"ranks": None}), "$.ranks"),
        (json.dumps(DOCUMENT | {"machine": "x"}), "$.machine"),
        (json.dumps(DOCUMENT | {"rows": [{**ROW, "bus": math.nan}]}), "$.rows"),
    ):
        (server.runs / "collectives" / f"{first}.json").write_text(text)
        app.run()
        assert not app.exception
        assert said in text_of(app)


def test_without_a_result_there_is_no_chart(
    communication: Callable[[], AppTest], machine: Machine, server: services.Services
) -> None:
    machine()
    path = new_result_path(server.runs, "nccl", 8)
    write_result(path, DOCUMENT)
    assert len(communication().get("plotly_chart")) == 1
    path.write_text(json.dumps(DOCUMENT | {"rows": DOCUMENT["rows"][1:]}))
    assert len(communication().get("plotly_chart")) == 0
    path.write_text(json.dumps(DOCUMENT | {"rows": []}))
    app = communication()
    assert len(app.get("plotly_chart")) == 0
    assert "has no results" in app.info[0].value
