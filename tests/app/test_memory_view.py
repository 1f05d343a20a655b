"""The memory page without a browser: which run, whose memory, what stands where numbers are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import services
from stepscope.run import RunKind
from tests.app.conftest import MAIN
from tests.support.app_page import header, trigger
from tests.support.ledger_rows import GPU, PROCESSES, device, process, sample
from tests.support.recorded_runs import write_run

MemoryPage = Callable[..., AppTest]
A100 = {"uuid": GPU, "name": "NVIDIA A100", "memory_total": 10 * 2**30}
ON_GPU = {"device": GPU, "kind": RunKind.WATCH, "devices": [A100], "name": "train.py", "pid": 1}


@pytest.fixture
def memory(server: services.Services) -> MemoryPage:
    """Run the memory page with URL parameters; no run of it may end in an exception."""

    def run(**params: str) -> AppTest:
        app = AppTest.from_file(str(MAIN), default_timeout=30)
        for name, value in {"tab": "memory", **params}.items():
            app.query_params[name] = value
        app.run()
        assert not app.exception
        return app

    return run


def mounted(app: AppTest) -> dict[str, Any]:
    """What the ledger's component was given."""
    drawn = [json.loads(part.proto.json) for part in app.get("bidi_component")]
    [found] = [data for data in drawn if "layout" in data and "header" not in data]
    told: dict[str, Any] = found
    return told


def said(app: AppTest) -> str:
    return "\n".join(part.value for part in [*app.markdown, *app.caption])


def cuda_run(root: Path, **run_json: Any) -> Path:
    rows = [process(tick) for tick in range(20)]
    gpu = [device(tick) for tick in range(20)]
    return write_run(root / "cuda", ON_GPU | run_json, gpu=GPU, samples=rows, devices=gpu)


def test_a_run_that_is_not_there_is_named(memory: MemoryPage) -> None:
    app = memory(run="20990101-000000-never")
    assert "20990101" in header(app)["trouble"]
    assert "No run is shown" in said(app)


def test_a_cpu_run_has_the_hosts_ledger_and_no_list_of_processes(
    memory: MemoryPage, tmp_path: Path
) -> None:
    rows = [sample(tick, process__rss=900, host__mem_total=8000) for tick in range(5)]
    write_run(tmp_path / "cpu", {"device": "cpu", "name": "digits"}, samples=rows)
    app = memory(run="cpu")
    data = mounted(app)
    assert data["run"] == "cpu"
    labels = [trace["label"] for trace in data["layout"]["charts"][0]["traces"]]
    assert labels[0] == "available"
    assert "its workers" in labels
    assert "this run trains on the CPU" in said(app)
    assert "Other processes on this GPU" not in said(app)


def test_a_cuda_run_names_its_gpu_and_the_other_processes(
    memory: MemoryPage, tmp_path: Path
) -> None:
    cuda_run(tmp_path, gpu_processes={GPU: PROCESSES})
    app = memory(run="cuda")
    assert "NVIDIA A100" in said(app)
    labels = [trace["label"] for trace in mounted(app)["layout"]["charts"][0]["traces"]]
    assert "this process outside PyTorch" in labels
    [table] = app.dataframe
    assert list(table.value["PID"])[:2] == [3, 2]
    assert "train.py" not in list(table.value["Name"])  # the run itself


def test_hidden_processes_are_said_to_be_hidden(memory: MemoryPage, tmp_path: Path) -> None:
    cuda_run(tmp_path, capabilities={"missing": {GPU: {"processes": "hidden in a container"}}})
    app = memory(run="cuda")
    assert "Unknown: hidden in a container." in said(app)
    assert len(app.dataframe) == 0


def test_a_gpu_without_other_processes_says_so(memory: MemoryPage, tmp_path: Path) -> None:
    cuda_run(tmp_path, gpu_processes={GPU: [{"pid": 1, "name": "train.py"}]})
    assert "None. This run is the only" in said(memory(run="cuda"))


def test_another_run_can_be_chosen_and_the_address_follows(
    memory: MemoryPage, tmp_path: Path
) -> None:
    cuda_run(tmp_path)
    write_run(tmp_path / "cpu", {"device": "cpu", "name": "digits"}, samples=[sample(0)])
    app = memory(run="cuda")
    trigger(app, "run", "cpu")
    assert mounted(app)["run"] == "cpu"
    assert app.query_params["run"] == "cpu"
    trigger(app, "run", "")
    assert "No run is shown" in said(app)
    assert "run" not in app.query_params


@pytest.mark.parametrize("devices", [None, 7, [None], [{"uuid": GPU}], [{"name": "A100"}]])
def test_a_run_json_of_somebody_else_is_shown_as_far_as_it_goes(
    memory: MemoryPage, tmp_path: Path, devices: Any
) -> None:
    cuda_run(tmp_path, devices=devices, gpu_processes="none", capabilities=3)
    assert GPU in said(memory(run="cuda"))
