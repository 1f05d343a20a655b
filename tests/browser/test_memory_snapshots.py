"""A snapshot file as a person opens it: uploaded, listed, compared, downloaded."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from tests.support.browser_page import OpenPage, violations
from tests.support.server import Server
from tests.support.snapshots import REAL, live_block, snapshot

PAGE = "/?tab=memory"


def section(page: Page) -> Locator:
    return page.locator(".st-key-snapshots_section")


def send(page: Page, path: Path) -> None:
    section(page).get_by_role("button", name="Open a file…").click()
    page.locator("input[type=file]").set_input_files(path)


def test_a_file_is_uploaded_listed_and_compared_after_a_reload(
    open_page: OpenPage, server: Server, tmp_path: Path
) -> None:
    page = open_page(PAGE)
    path = Path(shutil.copy(REAL, tmp_path / "my run.pickle"))
    send(page, path)
    expect(section(page).get_by_test_id("stDataFrame")).to_have_count(1)
    (kept,) = (server.runs / "snapshots").iterdir()
    assert kept.read_bytes() == REAL.read_bytes()
    page.keyboard.press("Escape")  # the field and its faults are Streamlit's
    expect(page.locator("input[type=file]")).to_have_count(0)
    assert violations(page) == []

    (server.runs / "snapshots" / "less.pickle").write_bytes(
        pickle.dumps(snapshot([live_block(2**20)]))
    )
    page.reload()
    other = section(page).get_by_role("combobox", name="Compare with")
    other.click()
    page.get_by_role("option").first.click()
    expect(section(page).get_by_test_id("stDataFrame")).to_have_count(2)
    with page.expect_download() as download:
        section(page).get_by_test_id("stDownloadButton").get_by_role("button").click()
    assert download.value.suggested_filename in ("less.pickle", kept.name)
