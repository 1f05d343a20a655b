"""Several devices on the page: the controls that act, commands by hand, and restarted jobs."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

from dashboard import services
from stepscope.run import RUN_JSON, RunStatus
from tests.support.app_page import (
    GPU,
    KINDS,
    Machine,
    OpenPage,
    header,
    label,
    record,
    start_refused,
    text_of,
    widget,
)
from trainer.techniques import PARALLEL_SWITCHES

OTHER_GPU = replace(GPU, id="GPU-1", cuda_index=1)


def drawn(app: AppTest) -> set[str]:
    """The fields of several devices that have a widget."""
    keys = {part.key for kind in KINDS for part in app.get(kind)}
    return {one.field for one in PARALLEL_SWITCHES if f"config_{one.field}" in keys}


def test_ddp_brings_torchrun_and_what_acts_on_it(page: OpenPage) -> None:
    app = page()
    assert drawn(app) == {"strategy"}
    assert widget(app, "strategy").options[1:] == ["DDP", "FSDP2"]
    assert "DataParallel" in widget(app, "strategy").help.split("\n", 1)[1]
    widget(app, "strategy").set_value("ddp").run()
    assert drawn(app) == {
        *("strategy", "devices_per_node", "num_nodes", "max_restarts"),
        *("static_graph", "gradient_as_bucket_view", "bucket_cap_mb"),
    }
    assert widget(app, "devices_per_node").value == 2
    assert app.query_params["strategy"] == "ddp"
    assert app.query_params["runner"] == "torchrun"
    assert start_refused(app) is None
    assert "128 × 2 ranks" in text_of(app)
    assert not [box for box in app.selectbox if box.key == "config_runner"]
    widget(app, "gradient_accumulation_steps").set_value(4).run()
    assert "no_sync" in drawn(app)
    assert "1,024" in text_of(app)
    widget(app, "strategy").set_value("fsdp").run()
    assert {"reshard_after_forward", "no_sync"} <= drawn(app)
    assert "bucket_cap_mb" not in drawn(app)
    widget(app, "strategy").set_value("none").run()
    assert drawn(app) == {"strategy"}
    assert "runner" not in app.query_params
    assert start_refused(app) is None


def test_ranks_on_gpus(page: OpenPage, machine: Machine) -> None:
    machine(GPU, OTHER_GPU)
    app = page()
    widget(app, "strategy").set_value("dp").run()
    assert drawn(app) == {"strategy", "devices_per_node"}
    assert widget(app, "devices_per_node").value == 2
    widget(app, "strategy").set_value("fsdp").run()
    assert {"cpu_offload", "time_collectives"} <= drawn(app)
    widget(app, "devices_per_node").set_value(3).run()
    assert "devices_per_node" in str(start_refused(app))


def test_a_link_without_a_runner_can_start_and_another_workload_keeps_the_ranks(
    page: OpenPage,
) -> None:
    app = page(strategy="ddp", devices_per_node="3", static_graph="1")
    assert app.query_params["runner"] == "torchrun"
    assert start_refused(app) is None
    about = {one.field: one for one in PARALLEL_SWITCHES}
    for name in ("strategy", "devices_per_node", "num_nodes", "static_graph", "bucket_cap_mb"):
        assert widget(app, name).label == about[name].label
        assert widget(app, name).help.startswith(about[name].help)
    label(app, "selectbox", "Workload").select("digits_mlp").run()
    assert widget(app, "devices_per_node").value == 3
    assert widget(app, "static_graph").value is True


def pairs(command: str) -> list[str]:
    """Return each two words of a command that follow each other."""
    return [f"{first} {second}" for first, second in itertools.pairwise(command.split())]


def test_several_nodes_get_their_command_instead_of_start(page: OpenPage) -> None:
    app = page(strategy="ddp", devices_per_node="4", num_nodes="2", workload="linear")
    assert start_refused(app) is not None
    command, script = [code.value for code in app.code if "--nnodes" in code.value]
    assert {"--nnodes 2", "--nproc-per-node 4"} <= {*pairs(command)}
    assert "--nodes=2" in script.split()
    again = [code.value for code in page(strategy="ddp", devices_per_node="4", num_nodes="2").code]
    assert command not in again  # another session starts another run
    host = label(app, "text_input", "First node")
    host.set_value("gpu-7").run()
    moved, _ = [code.value for code in app.code if "--nnodes" in code.value]
    assert "--rdzv-endpoint gpu-7:29500" in pairs(moved)
    assert moved.split("-m ")[1] == command.split("-m ")[1]  # the same run all the while
    label(app, "text_input", "First node").set_value("no host").run()
    assert len(app.error) == 1


RESTART = {"number": 1, "of": 3, "cause": "rank 2 was killed (SIGKILL)", "rank": 2, "step": 400}


def change(folder: Path, **entries: Any) -> None:
    told = json.loads((folder / RUN_JSON).read_text())
    (folder / RUN_JSON).write_text(json.dumps(told | entries))


def test_the_page_follows_a_restarted_job_and_leads_to_the_attempt_before(
    page: OpenPage, server: services.Services
) -> None:
    before = record(server.runs, "first", RunStatus.FAILED)
    later = record(server.runs, "second")
    ended = json.loads((before / RUN_JSON).read_text())
    change(before, status="running", heartbeat=time.time())
    change(later, restart_of=before.name, restart=RESTART)
    app = page(run=before.name)
    assert header(app)["picked"] == before.name
    change(before, **ended | {"restarted_as": later.name})
    app.run()
    assert header(app)["picked"] == later.name
    assert app.query_params["run"] == later.name
    assert RESTART["cause"] in text_of(app).replace("\\", "")
    label(app, "button", "Previous attempt").click().run()
    assert header(app)["picked"] == before.name
    app.run()  # the user has chosen the old attempt: the page stays there
    assert header(app)["picked"] == before.name
    assert label(app, "button", "Next attempt").help
