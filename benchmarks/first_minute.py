"""From an empty environment to the first chart of `stepscope demo`, with uv and with pip.

    python -m benchmarks.first_minute

Builds the wheel and installs `stepscope[ui]` once, which fills the package caches. Measures a
second time: new environment, installation, start of the server, and Chromium until all charts in
view are drawn. No torch. Beside it `trackio show`, until its first page. Needs uv and Playwright.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from benchmarks import report
from benchmarks.serving import ROOT, await_health, chromium, free_port

TARGET_S = 15.0
TIMEOUT_MS = 120_000
LARGEST = 8  # folders of site-packages listed by size
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Program:
    """A program to install and start, and what its page has when it is drawn."""

    package: str
    words: tuple[str, ...]
    path: str
    health: str
    drawn: str


def main() -> None:
    """Measure and print one JSON object last."""
    if (uv := shutil.which("uv")) is None:
        raise SystemExit("uv is missing. Install it: pip install uv")
    load, found = os.getloadavg()[0], {}
    with tempfile.TemporaryDirectory() as made, chromium() as browser:
        wheel = build_wheel(Path(made))
        for program in (
            Program(
                package=f"stepscope[ui] @ {wheel.as_uri()}",
                words=("stepscope", "demo", "--no-browser", "--port"),
                path="/?run=h100",
                health="/_stcore/health",
                drawn="[data-testid=stepscope-live][data-ready]",
            ),
            Program("trackio", ("trackio", "show"), "/", "/", "#app > *"),
        ):
            for installer in ("uv", "pip"):
                for _ in ("caches are filled", "measured"):
                    with tempfile.TemporaryDirectory(dir=made) as folder:
                        row = measure(program, installer, uv, Path(folder), browser)
                name = f"{' '.join(program.words[:2])}, {installer}"
                found[name] = row
                report.say(f"{name}: {row}")
    targets = {"total_s": report.at_most(found["stepscope demo, uv"]["total_s"], TARGET_S)}
    report.report("first_minute", {}, load, {"programs": found, "targets": targets})


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*pip, str(ROOT)], check=True)
    return next(folder.glob("*.whl"))


def measure(
    program: Program, installer: str, uv: str, folder: Path, browser: Browser
) -> dict[str, Any]:
    """Return the seconds of each part, and the size of the environment in MiB."""
    python = folder / "venv" / "bin" / "python"
    began = time.monotonic()
    if installer == "uv":
        run(uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
        run(uv, "pip", "install", "--quiet", "--python", str(python), program.package)
    else:
        run(sys.executable, "-m", "venv", str(folder / "venv"))
        run(str(python), "-m", "pip", "install", "--quiet", program.package)
    installed = time.monotonic()
    port, log = free_port(), folder / "server.log"
    variables = {"GRADIO_SERVER_PORT": str(port), "TRACKIO_DIR": str(folder), "BROWSER": "true"}
    words = [str(python.with_name(program.words[0])), *program.words[1:]]
    words += [str(port)] if words[-1] == "--port" else []
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=os.environ | variables, stdout=output, stderr=output
        )
    try:
        url = f"http://127.0.0.1:{port}"
        await_health(f"{url}{program.health}", process, log)
        answered = time.monotonic()
        page = browser.new_page()
        page.goto(f"{url}{program.path}", timeout=TIMEOUT_MS)
        page.locator(program.drawn).first.wait_for(timeout=TIMEOUT_MS)
        drawn = time.monotonic()
        page.close()
    finally:
        process.terminate()
        process.wait(20)
    return {
        "install_s": round(installed - began, 1),
        "start_s": round(answered - installed, 1),
        "page_s": round(drawn - answered, 1),
        "total_s": round(drawn - began, 1),
        **sizes(folder / "venv"),
    }


def run(*command: str) -> None:
    """Run a command; its output is that of this program."""
    subprocess.run(command, check=True)


def sizes(environment: Path) -> dict[str, Any]:
    """Return the size of an environment and of its largest packages, in MiB."""
    (packages,) = environment.glob("lib/*/site-packages")
    found = {path.name: size(path) for path in packages.iterdir() if path.is_dir()}
    largest = sorted(found, key=lambda name: -found[name])[:LARGEST]
    rounded = {name: round(found[name] / MIB, 1) for name in largest}
    return {"mib": round(size(environment) / MIB), "largest": rounded}


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


if __name__ == "__main__":
    main()
