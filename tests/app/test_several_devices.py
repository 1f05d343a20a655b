"""Several devices on the page: the controls that act."""

from __future__ import annotations

from dataclasses import replace

from streamlit.testing.v1 import AppTest

from tests.support.app_page import (
    GPU,
    KINDS,
    Machine,
    OpenPage,
    start_refused,
    text_of,
    widget,
)
from trainer.config import SETTINGS

OTHER_GPU = replace(GPU, id="GPU-1", cuda_index=1)


def drawn(app: AppTest) -> set[str]:
    """The fields of several devices that have a widget."""
    keys = {part.key for kind in KINDS for part in app.get(kind)}
    return {name for name in ("strategy", "devices_per_node") if f"config_{name}" in keys}


def test_ddp_brings_torchrun_and_what_acts_on_it(page: OpenPage) -> None:
    app = page()
    assert drawn(app) == {"strategy"}
    assert widget(app, "strategy").options[1:] == ["DDP", "FSDP2"]
    widget(app, "strategy").set_value("ddp").run()
    assert drawn(app) == {"strategy", "devices_per_node"}
    assert widget(app, "devices_per_node").value == 2
    assert app.query_params["runner"] == "torchrun"
    assert "Each step uses 256 samples" in text_of(app)
    widget(app, "gradient_accumulation_steps").set_value(4).run()
    assert "1,024" in text_of(app)
    widget(app, "strategy").set_value("none").run()
    assert drawn(app) == {"strategy"}
    assert "runner" not in app.query_params
    assert start_refused(app) is None


def test_ranks_on_gpus(page: OpenPage, machine: Machine) -> None:
    machine(GPU, OTHER_GPU)
    app = page()
    widget(app, "strategy").set_value("dp").run()
    assert widget(app, "devices_per_node").value == 2
    widget(app, "strategy").set_value("fsdp").run()
    widget(app, "devices_per_node").set_value(3).run()
    assert SETTINGS["devices_per_node"].label in str(start_refused(app))
