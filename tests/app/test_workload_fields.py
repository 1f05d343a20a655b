"""The sidebar's fields of single workloads: sizes, image data, and the custom workload."""

from __future__ import annotations

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from tests.support.app_page import OpenPage, start_refused
from trainer.config import SETTINGS, Workload, reads
from trainer.workloads import custom_file
from trainer.workloads.custom_file import choose
from trainer.workloads.datasets import MAKE_DIGITS, VARIABLE

FIELDS = {name for name, about in SETTINGS.items() if about.read_by}
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_workload.py"
CUSTOM = SETTINGS["workload"].choices[Workload.CUSTOM]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of datasets."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(custom_file.VARIABLE, "")


def captions(app: AppTest) -> str:
    return "\n".join(caption.value for caption in app.sidebar.caption)


def drawn(app: AppTest) -> dict[str, object]:
    widgets = [*app.sidebar.number_input, *app.sidebar.toggle]
    return {widget.label: widget.value for widget in widgets}


def test_a_workload_shows_its_own_fields_with_its_own_defaults(page: OpenPage) -> None:
    app = page(workload="gpt", num_layers="3", width="96", dropout="0.25")
    shown = drawn(app)
    assert (shown["Layers"], shown["Width"], shown["Context"]) == (3, 96, 64)
    labels = {name: SETTINGS[name].label for name in FIELDS}
    for workload in (Workload.LINEAR, Workload.GPT, Workload.RESNET):
        app.sidebar.selectbox(key="config_workload").select(workload).run()
        expected = {label for name, label in labels.items() if reads(workload, name)}
        assert drawn(app).keys() & set(labels.values()) == expected


def test_a_dataset_of_the_data_folder_or_the_command_that_makes_one(
    page: OpenPage, root: Path
) -> None:
    app = page(workload="images")
    (warning,) = app.warning
    for text in (captions(app), warning.value):  # as code that can be copied, without the period
        assert f"`{MAKE_DIGITS} {root}/digits`." in text
    assert MAKE_DIGITS in str(start_refused(app))
    for name in ("digits/train.csv", "mine.csv"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    app = page(workload="images", dataset="../../etc/passwd")
    box = app.sidebar.selectbox(key="config_dataset")
    assert (box.value, box.options) == ("digits", ["digits", "mine.csv"])
    box.select("mine.csv").run()
    assert app.query_params["dataset"] in ("mine.csv", ["mine.csv"])


def test_a_custom_workload_is_offered_only_if_given(page: OpenPage) -> None:
    assert CUSTOM not in page().sidebar.selectbox(key="config_workload").options
    link = captions(page(workload="custom"))
    # As code: in text the two hyphens would become one dash.
    assert ":build`" in link
    choose(f"{EXAMPLE}:build")
    app = page(workload="custom")
    assert CUSTOM in app.sidebar.selectbox(key="config_workload").options
    assert "own_workload.py:build" in captions(app)
