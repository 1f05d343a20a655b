"""Makes docs/images from the recorded examples: each in light and dark, as the page is now.

make screenshots        (python -m docs.screenshots; needs Debian's chromium)
"""

from __future__ import annotations

import shutil
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

from tests.conftest import CHROMIUM_ARGS
from tests.support.server import Server, start_server, stop_server

IMAGES = Path(__file__).resolve().parent / "images"
SIZE = {"width": 1400, "height": 1000}
COLORS = 192  # of a palette: a page of flat colors looks the same in a quarter of the bytes
LARGEST = 200_000
"""Bytes of one image."""


def take(browser: Browser, server: Server, run: str, theme: str) -> bytes:
    """Return the page of a run as PNG, once its charts are drawn."""
    context = browser.new_context(viewport=SIZE, color_scheme=theme)
    page = context.new_page()
    page.goto(f"{server.url}/?run={run}")
    live = page.get_by_test_id("stepscope-live")
    expect(live).to_have_attribute("data-ready", "1", timeout=60_000)
    expect(page.locator(".js-plotly-plot .lines path").first).to_be_visible(timeout=60_000)
    page.wait_for_timeout(2_000)  # the last charts
    shot = page.screenshot()
    context.close()
    picture = BytesIO()
    Image.open(BytesIO(shot)).convert("RGB").quantize(COLORS).save(picture, "PNG", optimize=True)
    return picture.getvalue()


def main() -> None:
    """Take all pictures on a server of its own, which has no runs but the examples."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as session:
        browser = session.chromium.launch(
            executable_path=shutil.which("chromium"), args=CHROMIUM_ARGS
        )
        server = start_server(Path(folder), CUDA_VISIBLE_DEVICES="")
        try:
            for run in ("cpu-training", "two-simulated-gpus", "h100"):
                for theme in ("light", "dark"):
                    data = take(browser, server, run, theme)
                    path = IMAGES / f"{run}-{theme}.png"
                    if len(data) > LARGEST:
                        raise ValueError(f"{path.name}: must be {LARGEST} bytes, got {len(data)}.")
                    path.write_bytes(data)
        finally:
            stop_server(server)
            browser.close()


if __name__ == "__main__":
    main()
