"""The sidebar draws the fields of the chosen workload, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.controls.workload_fields import FIELDS
from trainer.config import Workload
from trainer.workload_traits import TRAITS

OpenPage = Callable[..., AppTest]
WITH_FIELDS = [workload for workload in Workload if TRAITS[workload].fields]


def drawn(app: AppTest) -> dict[str, object]:
    widgets = [*app.sidebar.number_input, *app.sidebar.toggle]
    return {widget.label: widget.value for widget in widgets}


@pytest.mark.parametrize("workload", [Workload.LINEAR, Workload.GPT, Workload.RESNET])
def test_a_workload_shows_its_own_fields_only(page: OpenPage, workload: Workload) -> None:
    shown = set(drawn(page(workload=workload.value)))
    expected = {FIELDS[name][0] for name in TRAITS[workload].fields}
    assert shown & {label for label, _ in FIELDS.values()} == expected


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
    # The switches of the user's own file have the words that it gives them.
    for name in {name for workload in WITH_FIELDS for name in TRAITS[workload].fields} - {
        "custom_options"
    }:
        label, text = FIELDS[name]
        assert label
        assert text.endswith(".")
