"""Estimate memory and Find max batch size: progress, result, refusal, the recommended batch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dashboard.format import escape_markdown
from dashboard.services import ServerActivity, Services
from dashboard.views.memory_probe import batch_rows, part_rows
from stepscope.host.child_process import ChildOutput, ChildState
from stepscope.run import RunError
from tests.support.app_page import GPU, Machine, OpenPage, label
from tests.support.run_folders import make_run
from trainer.config import Workload, defaults

GIB = 2**30


def probe(size: int, *, fits: bool = True, reserved: int | None = 4 * GIB) -> dict[str, Any]:
    return {
        "batch_size": size,
        "fits": fits,
        "reason": None if fits else "The GPU ran out of memory.",
        "device_name": "a device",
        "steps": 3,
        "measured_peak_bytes": 3 * GIB,
        "measured_reserved_bytes": reserved,
        "parts": {
            "parameters_and_buffers": GIB,
            "optimizer_state": 0,
            "gradients_activations_and_the_rest": 2 * GIB,
        },
        "free_bytes": 8 * GIB,
        "samples_per_sec": 10.0 * size,
    }


def keep_ended(
    server: Services, output: ChildOutput, *, search: bool = False, batch_size: int = 128
) -> None:
    """Make this the last probe, in the place of a child process that has ended."""
    child: Any = SimpleNamespace(
        config=replace(defaults(Workload.LINEAR), batch_size=batch_size),
        search=search,
        output=lambda: output,
        running=lambda: False,
        stop=lambda: None,
    )
    server.probe = child


def test_the_settings_of_the_sidebar_are_measured(page: OpenPage, server: Services) -> None:
    app = page(workload="linear", device="cpu", batch_size="256")
    label(app, "button", "Estimate memory").click().run()
    run = server.probe
    assert run is not None
    assert run.config.batch_size == 256
    assert run.wait(300)
    app.run()
    assert not app.exception
    assert run.output().state is ChildState.FINISHED, run.output()
    assert len(app.success) == 1, "it fits"
    label(app, "button", "Close").click().run()
    assert server.probe is None


def test_another_probe_replaces_the_running_one_and_can_be_stopped(
    page: OpenPage, server: Services
) -> None:
    app = page(workload="gpt", device="cpu")
    label(app, "button", "Estimate memory").click().run()
    first = server.probe
    for activity in (ServerActivity.RUN, ServerActivity.LESSON):
        with pytest.raises(RunError):
            server.begin(activity, lambda: None)
    label(app, "button", "Find max batch size").click().run()
    second = server.probe
    assert first.output().state is ChildState.STOPPED
    assert second.search
    label(app, "button", "Stop").click().run()
    assert second.output().state is ChildState.STOPPED


def test_buttons_are_disabled_with_the_reason(
    page: OpenPage, server: Services, machine: Machine
) -> None:

    def reasons(**params: str) -> set[str]:
        app = page(workload="linear", **params)
        buttons = [
            label(app, "button", text) for text in ("Estimate memory", "Find max batch size")
        ]
        assert all(button.disabled for button in buttons)
        return {button.help for button in buttons}

    (reason,) = reasons(device="cpu", strategy="ddp", devices_per_node="2")
    assert reason.startswith("strategy: ")
    machine(GPU)
    live = make_run(server.runs, "live", config={"device": GPU.id})
    server.run_list.fresh()
    (reason,) = reasons(device=GPU.id)
    assert live.name in reason
    server.active_id = lambda: "one"  # type: ignore[method-assign]
    assert reasons(device="cpu") == {server.busy_reason(ServerActivity.MEMORY_PROBE)}


def test_the_recommended_batch_can_be_applied(page: OpenPage, server: Services) -> None:
    answer = {
        "points": [probe(128), probe(256), probe(512, fits=False)],
        "largest": 256,
        "recommended": 256,
        "why": "256 fits, 512 does not.",
    }
    keep_ended(server, ChildOutput(ChildState.FINISHED, 3.0, answer=answer), search=True)
    app = page(workload="linear", device="cpu", batch_size="128")
    assert escape_markdown(answer["why"]) in app.success[0].value
    app.button(key="probe_use").click().run()
    assert app.number_input(key="config_batch_size").value == 256


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (ChildOutput(ChildState.FINISHED, answer=probe(128, fits=False)), "Does not fit"),
        (ChildOutput(ChildState.FAILED, reason="It <b>broke."), r"\<b\>broke"),
    ],
)
def test_a_failure_has_its_reason(
    page: OpenPage, server: Services, output: ChildOutput, text: str
) -> None:
    keep_ended(server, output)
    app = page(workload="linear", device="cpu")
    assert text in app.error[0].value


def test_the_tables_have_what_was_measured() -> None:
    rows = {row["Memory"]: row for row in part_rows(probe(128))}
    assert rows["Peak"]["Size"] == "3.00 GiB"
    assert len(part_rows(probe(128, reserved=None))) == len(rows) - 1
    sizes = batch_rows([probe(64), probe(128, reserved=None), probe(256, fits=False)])
    assert [row.get("Samples/s") for row in sizes] == [640.0, 1280.0, None]
