"""A report opens from a file: no request, no error, and axe finds nothing in both themes.

The button on Details downloads it, and a chart is saved as SVG.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from stepscope.compare.reports import run_report
from stepscope.run import read_run
from tests.support.browser_page import OpenPage, button, open_tab, violations
from tests.support.server import ROOT


def test_a_report_opens_offline(browser: Browser, tmp_path: Path) -> None:
    names = ("two-simulated-gpus", "cpu-training", "h100", "h100")  # five columns: a wide table
    copies = [shutil.copytree(ROOT / "examples" / one, tmp_path / one) for one in {*names}]
    runs = {folder.name: read_run(folder) for folder in copies}
    (tmp_path / "report.html").write_text(run_report([runs[name] for name in names]))
    context = browser.new_context(bypass_csp=True)  # axe is a script
    page, requests, messages = context.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.goto((tmp_path / "report.html").as_uri())
    assert len(requests) == 1
    assert messages == []
    for width in (1400, 400):
        page.set_viewport_size({"width": width, "height": 900})
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def save(page: Page, name: str, folder: Path) -> Path:
    # A press while the page is drawn is lost.
    app = page.get_by_test_id("stApp")
    expect(app).to_have_attribute("data-test-script-state", "notRunning")
    with page.expect_download() as download:
        button(page, name).first.click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def test_the_buttons_download_reports_and_images(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page("/?run=cpu-training")
    chart = page.get_by_test_id("chart-loss")
    expect(chart.locator(".lines path").first).to_be_visible()
    with page.expect_download() as download:
        chart.hover()
        chart.locator("[data-title='Download plot as an SVG']").click()
    assert b"<svg" in Path(download.value.path()).read_bytes()
    open_tab(page, "Details")
    details = save(page, "Report", tmp_path)
    report = page.context.new_page()
    report.goto(details.as_uri())
    expect(report.get_by_role("heading", name="Summary").first).to_be_visible()
