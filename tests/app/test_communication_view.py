"""The Collectives tab: refusals, a measurement, files to compare."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import services
from stepscope.run import RunError
from tests.support.app_page import GPU, Machine, label
from tests.support.collectives_results import DOCUMENT, ROW
from tests.support.waiting import wait_until
from trainer.collectives import measurement
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


def test_nccl_without_gpus_cannot_be_measured(
    communication: Callable[[], AppTest], machine: Machine
) -> None:
    machine()
    app = communication()
    assert "**Measure**" in app.info[0].value
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


def test_with_two_gpus_nccl_is_offered_and_more_ranks_are_refused(
    communication: Callable[[], AppTest], machine: Machine
) -> None:
    machine(GPU, replace(GPU, id="GPU-other", cuda_index=1))
    app = communication()
    assert label(app, "selectbox", "Backend").value == "nccl"
    assert label(app, "number_input", "Ranks").value == 2
    assert not label(app, "button", "Measure").disabled
    label(app, "number_input", "Ranks").set_value(3).run()
    assert label(app, "button", "Measure").disabled


@pytest.fixture
def end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file at which a measurement ends; a shell script stands for torchrun's ranks."""
    end, program = tmp_path / "end", tmp_path / "python"
    lines = [json.dumps({"machine": DOCUMENT["machine"]}), json.dumps({"result": ROW})]
    program.write_text(
        f"#!/bin/sh\nwhile [ ! -e {end} ]; do sleep 0.05; done\n"
        f"echo '{lines[0]}'\necho '{lines[1]}'\necho '{{\"end\": true}}'\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(measurement, "sys", SimpleNamespace(executable=str(program)))
    return end


def test_a_measurement_blocks_other_activities_and_is_kept_and_shown(
    communication: Callable[[], AppTest], machine: Machine, server: services.Services, end: Path
) -> None:
    """integration/test_collectives_measured.py measures with real ranks."""
    machine()
    app = communication()
    label(app, "selectbox", "Largest size").select(2**20).run()
    label(app, "button", "Measure").click().run()
    assert label(app, "button", "Stop").help
    with pytest.raises(RunError):
        server.begin(services.ServerActivity.COLLECTIVES, lambda: None)
    assert server.busy_reason(services.ServerActivity.LESSON) is not None
    end.touch()
    wait_until(lambda: server.collectives.running() is None)
    app.run()
    assert not app.exception
    [name] = result_names(server.runs)
    assert label(app, "selectbox", "Measurement").value == name
    kept = read_result(server.runs, name)
    assert (kept["rows"], kept["ranks"], kept["sizes"][-1]) == ([ROW], 2, 2**20)
    assert len(app.dataframe) == 1
    assert server.busy_reason(services.ServerActivity.LESSON) is None


def test_kept_ones_are_compared_and_a_broken_one_is_refused(
    communication: Callable[[], AppTest], machine: Machine, server: services.Services
) -> None:
    machine()
    for _ in range(2):
        write_result(new_result_path(server.runs, "nccl", 8), DOCUMENT)
    first, second = result_names(server.runs)
    app = communication()
    assert label(app, "selectbox", "Measurement").options == [first, second]
    label(app, "selectbox", "Compare with").select(second).run()
    assert not app.exception
    for text, problem in (
        ("{", first),
        (json.dumps(DOCUMENT | {"ranks": None}), "$.ranks"),
        (json.dumps(DOCUMENT | {"machine": "x"}), "$.machine"),
        (json.dumps(DOCUMENT | {"rows": [{**ROW, "bus": math.nan}]}), "$.rows"),
    ):
        (server.runs / "collectives" / f"{first}.json").write_text(text)
        app.run()
        assert not app.exception
        assert problem in app.warning[0].value


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
    assert len(app.info) == 1
