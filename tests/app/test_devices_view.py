"""The Hardware page: without a GPU, and with several."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from dashboard.machine import machine_poller
from dashboard.machine.machine_poller import MachinePoller, MachineReading
from dashboard.services import Services
from stepscope.gpu.source import NullSource
from tests.support.app_page import OpenPage, at_address
from tests.support.fake_machine import FakeErrors, FakeSource, divided, gpus, info, machine

Sees = Callable[[object], None]


@pytest.fixture
def sees(server: Services, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sees]:
    """Let the server see these GPUs, whatever this machine has."""
    FakeErrors.begun = []
    monkeypatch.setattr(machine_poller, "XidWatcher", FakeErrors)
    made: list[MachinePoller] = []

    def see(source: object) -> None:
        made.append(MachinePoller(machine(source)))
        monkeypatch.setattr(server, "machine", made[-1])

    yield see
    for watch in made:
        watch.close()


@pytest.mark.parametrize("count", [0, 2])
def test_the_page_has_a_row_for_every_gpu_or_why_there_is_none(
    page: OpenPage, sees: Sees, count: int
) -> None:
    reason = None if count else "The NVIDIA driver is not loaded."
    sees(FakeSource(gpus(count)) if reason is None else NullSource(reason))
    app = at_address(page, "hardware")
    assert app.markdown[0].value.startswith("**"), "no string of the page's script is drawn"
    if reason is not None:
        assert "driver is not loaded" in app.info[0].value
        assert not app.dataframe
        return
    assert app.dataframe[0].value["GPU"].tolist() == [f"GPU {n}" for n in range(count)]
    lines = json.loads(app.get("plotly_chart")[0].proto.spec)["data"]
    assert [line["name"] for line in lines] == [f"GPU {n}" for n in range(count)]


def test_all_values_of_a_gpu_are_shown_on_request(
    page: OpenPage,
    server: Services,
    sees: Sees,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sees(FakeSource([*gpus(1), divided(1)]))
    app = at_address(page, "hardware")
    app.session_state["gpu_details"] = True
    app.session_state["gpu"] = 1
    app.run()
    readings = dict(app.dataframe[1].value[["Value", "Reading"]].to_numpy().tolist())
    assert readings["UUID"] == info(1).uuid


def test_a_driver_that_fails_is_named_and_the_page_stays(
    page: OpenPage, server: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = MachineReading(None, "The NVIDIA driver does not respond.")
    monkeypatch.setattr(server.machine, "read", lambda: silent)
    app = at_address(page, "hardware")
    assert "does not respond" in app.warning[0].value
