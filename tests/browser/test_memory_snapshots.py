"""The snapshots of a run as a person opens them: listed, compared, downloaded."""

from __future__ import annotations

import pickle
import shutil

from playwright.sync_api import expect

from tests.support.app_page import record
from tests.support.browser_page import OpenPage, violations
from tests.support.server import Server
from tests.support.snapshots import REAL, live_block, snapshot


def test_snapshots_of_a_run_are_listed_compared_and_downloaded(
    open_page: OpenPage, server: Server
) -> None:
    folder = record(server.runs, "one", device="GPU-1")
    shutil.copy(REAL, folder / "snapshot-step-5.pickle")
    less = pickle.dumps(snapshot([live_block(2**20)]))
    (folder / "snapshot-step-9.pickle").write_bytes(less)
    page = open_page("/?run=one&tab=memory")
    section = page.locator(".st-key-snapshots_section")
    expect(section.get_by_test_id("stDataFrame")).to_have_count(1)
    assert violations(page) == []
    section.get_by_role("combobox", name="Compare with").click()
    page.get_by_role("option").first.click()
    expect(section.get_by_test_id("stDataFrame")).to_have_count(2)
    with page.expect_download() as download:
        section.get_by_test_id("stDownloadButton").get_by_role("button").click()
    assert download.value.suggested_filename == "one-snapshot-step-9.pickle"
    assert download.value.path().read_bytes() == less
