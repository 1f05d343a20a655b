"""The Hardware page: without a GPU, and with several."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from dashboard import services
from dashboard.api.devices import devices_answer
from dashboard.machine import machine_poller
from dashboard.machine.machine_poller import MachinePoller
from stepscope.gpu.source import NullSource
from stepscope.run import RunError
from tests.support.app_page import OpenPage, at_address, component
from tests.support.fake_machine import FakeErrors, FakeSource, divided, gpus, info, machine

Sees = Callable[[object], None]


@pytest.fixture
def sees(server: services.Services, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sees]:
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


@pytest.mark.parametrize("count", [0, 1, 16])
def test_the_page_has_a_card_for_every_gpu_or_why_there_is_none(
    page: OpenPage, sees: Sees, count: int
) -> None:
    reason = None if count else "The NVIDIA driver is not loaded."
    sees(FakeSource(gpus(count)) if reason is None else NullSource(reason))
    app = at_address(page, "hardware")
    told = component(app)["first"]["machine"]
    assert [card["title"] for card in told["cards"]] == [f"GPU {n}" for n in range(count)]
    assert told["host"]["memory"]["share"] > 0
    assert (told["none"] or {"reason": None})["reason"] == reason
    if count == 0:
        assert dict(told["host"]["facts"])["Driver"] == "none"


def test_a_gpu_is_answered_with_details_and_what_is_new_of_its_history(
    server: services.Services, sees: Sees
) -> None:
    sees(FakeSource([*gpus(2), divided(2)]))
    whole = devices_answer(server, {"gpu": info(1).uuid})
    json.dumps(whole, allow_nan=False)
    assert whole["gpu"]["title"] == "GPU 1"
    (at,) = whole["gpu"]["history"]["t"]
    later = devices_answer(server, {"gpu": info(1).uuid, "since": str(at + 1)})
    assert later["gpu"]["history"]["t"] == []
    assert len(devices_answer(server, {"gpu": info(2).uuid})["gpu"]["instances"]) == 2
    assert devices_answer(server, {})["gpu"] is None


@pytest.mark.parametrize(("index", "name"), [(None, "none:"), (2, "cuda:2")])
def test_the_details_have_torchs_name_of_a_gpu(
    server: services.Services,
    sees: Sees,
    monkeypatch: pytest.MonkeyPatch,
    index: int | None,
    name: str,
) -> None:
    sees(FakeSource(gpus(1)))
    indices = {} if index is None else {info().uuid: index}
    monkeypatch.setattr(server, "cuda_indices", lambda: indices)
    groups = devices_answer(server, {"gpu": info().uuid})["gpu"]["groups"]
    values = [str(row[1]) for group in groups for row in group["rows"]]
    assert any(value.startswith(name) for value in values)


@pytest.mark.parametrize("since", ["nan", "inf", "x" * 50])
def test_a_wrong_question_is_refused(server: services.Services, sees: Sees, since: str) -> None:
    sees(FakeSource(gpus(1)))
    with pytest.raises(RunError, match="has no GPU"):
        devices_answer(server, {"gpu": "../../etc/passwd"})
    with pytest.raises(ValueError, match="since"):
        devices_answer(server, {"gpu": info().uuid, "since": since})
