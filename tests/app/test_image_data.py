"""Choosing image data on the page, and what it says where there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from tests.support.app_page import start_refused
from trainer.datasets import MAKE_DIGITS, VARIABLE

OpenPage = Callable[..., AppTest]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def said(app: AppTest) -> str:
    return "\n".join(caption.value for caption in app.sidebar.caption)


def test_without_data_the_page_tells_the_command(page: OpenPage, root: Path) -> None:
    app = page(workload="images")
    # As code, with the end of the sentence outside: it can be copied.
    assert f"`{MAKE_DIGITS} {root}/digits`." in said(app)
    assert MAKE_DIGITS in str(start_refused(app))
    (warning,) = app.warning  # where the page says what to press
    assert f"`{MAKE_DIGITS} {root}/digits`." in warning.value


def test_what_the_data_folder_has_is_on_offer(page: OpenPage, root: Path) -> None:
    for name in ("digits/train.csv", "mine.csv"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    app = page(workload="images")
    box = app.sidebar.selectbox(key="config_dataset")
    assert (box.value, box.options) == ("digits", ["digits", "mine.csv"])
    assert MAKE_DIGITS not in said(app)
    assert not app.warning
    box.select("mine.csv").run()
    assert not app.exception
    assert app.query_params["dataset"] in ("mine.csv", ["mine.csv"])


def test_a_link_to_data_that_are_not_here_names_what_is(page: OpenPage, root: Path) -> None:
    (root / "mine.csv").touch()
    app = page(workload="images", dataset="caltech")
    assert "Choose mine.csv" in said(app)
    app = page(workload="images", dataset="../../etc/passwd")
    assert app.sidebar.selectbox(key="config_dataset").value == "digits"
