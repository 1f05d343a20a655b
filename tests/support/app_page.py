"""The page under AppTest: what it shows, what a person does on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

from dashboard import services
from stepscope.run import RunStatus
from stepscope.store.recorder import Recorder
from tests.support.waiting import wait_until
from trainer.config import RunConfig
from trainer.training.config_validation import TrainDevice

OpenPage = Callable[..., AppTest]
Learn = Callable[..., AppTest]
Machine = Callable[..., None]
KINDS = ("toggle", "number_input", "selectbox")
GPU = TrainDevice(
    id="GPU-11111111-2222-3333-4444-555555555555",
    name="NVIDIA T4",
    memory_total=15 * 2**30,
    cuda_index=0,
    compute_capability=(7, 5),
)
NO_GPU = "torch 2.13.0+cpu is a CPU-only build."


def record(root: Path, name: str, status: RunStatus = RunStatus.FINISHED, **run_info: Any) -> Path:
    folder = root / name
    folder.mkdir()
    recorder = Recorder(folder, name="digits_cnn", config=RunConfig().to_dict())
    recorder.describe(**run_info)
    recorder.log(1, {"train/loss": 1.0})
    recorder.close(status, "because" if status is RunStatus.FAILED else None)
    return folder


def component(app: AppTest) -> dict[str, Any]:
    """The component of the run, or of the GPUs: the first one of its page."""
    return drawn_components(app)[0]


def header(app: AppTest) -> dict[str, Any]:
    """What the header row is told: runs, buttons, what is in the way."""
    told: dict[str, Any] = component(app)["header"]
    return told


def at_address(page: OpenPage, view: str, **params: str) -> AppTest:
    """Open a page in a new session by its own address."""
    app = page()
    app.switch_page(f"views/{view}.py")
    for name, value in params.items():
        app.query_params[name] = value
    app.run()
    assert not app.exception
    return app


def start_run(app: AppTest) -> None:
    """Press Start run in the sidebar."""
    app.button(key="start_run").click().run()
    assert not app.exception


def start_refused(app: AppTest, name: str = "Start run") -> str | None:
    """Why a start button is disabled, the text below it; None where it is not."""
    parts = iter(app._tree)
    button: Any = next(part for part in parts if getattr(part, "label", None) == name)
    if not button.disabled:
        return None
    below: Any = next(parts)
    return str(below.value).removeprefix(":material/block: ").replace("\\", "")


def drawn_components(app: AppTest) -> list[dict[str, Any]]:
    """What each component was given."""
    return [json.loads(part.proto.json) for part in app.get("bidi_component")]


def trigger(app: AppTest, event: str, value: object = 1) -> None:
    """Do what the component in the browser does for a press or a choice."""
    live = app.get("bidi_component")[0]
    states = app._tree.get_widget_states()
    name = f"$$STREAMLIT_INTERNAL_KEY_{live.proto.id}__events"
    states.widgets.add(id=name, json_trigger_value=json.dumps([{"event": event, "value": value}]))
    app._run(states)
    assert not app.exception


def label(app: AppTest, kind: str, text: str) -> Any:
    return next(widget for widget in app.get(kind) if widget.label == text)


def text_of(app: AppTest) -> str:
    return " ".join(
        str(part.value)
        for kind in ("markdown", "caption", "success", "info", "warning", "error", "code")
        for part in app.get(kind)
    )


def widget(app: AppTest, field: str) -> Any:
    """The widget of a field of RunConfig."""
    (found,) = [part for kind in KINDS for part in app.get(kind) if part.key == f"config_{field}"]
    return found


def press(app: AppTest, name: str) -> None:
    label(app, "button", name).click().run()
    assert not app.exception


def wait_for_result(app: AppTest, server: services.Services) -> None:
    wait_until(lambda: server.running_lesson() is None, 60)
    app.run()
    assert not app.exception
