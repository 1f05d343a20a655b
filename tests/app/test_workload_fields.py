"""The sidebar draws the fields of the chosen workload, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.controls.config_widgets import TEXTS
from trainer.config import Workload
from trainer.workload_traits import TRAITS

OpenPage = Callable[..., AppTest]
# A custom workload brings the labels of its own options.
FIELDS = {name for traits in TRAITS.values() for name in traits.fields} - {"custom_options"}


def drawn(app: AppTest) -> dict[str, object]:
    widgets = [*app.sidebar.number_input, *app.sidebar.toggle]
    return {widget.label: widget.value for widget in widgets}


@pytest.mark.parametrize("workload", [Workload.LINEAR, Workload.GPT, Workload.RESNET])
def test_a_workload_shows_its_own_fields_only(page: OpenPage, workload: Workload) -> None:
    shown = set(drawn(page(workload=workload.value)))
    assert shown & {TEXTS[name][0] for name in FIELDS} == {
        TEXTS[name][0] for name in TRAITS[workload].fields
    }


def test_a_link_sets_them_and_another_workload_has_its_own_defaults(page: OpenPage) -> None:
    app = page(workload="gpt", num_layers="3", width="96", tie_embeddings="0", dropout="0.25")
    shown = drawn(app)
    assert (shown["Layers"], shown["Width"], shown["Context"]) == (3, 96, 64)
    assert (shown["Tie embeddings"], shown["Dropout"]) == (False, 0.25)
    app.sidebar.selectbox(key="config_workload").select(Workload.RESNET).run()
    assert not app.exception
    assert drawn(app)["Width"] == 64
    assert drawn(app)["Image size"] == 224


def test_every_field_has_a_label_and_help() -> None:
    assert all(TEXTS[name][0] and TEXTS[name][1].endswith(".") for name in FIELDS)
