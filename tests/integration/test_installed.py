"""The wheel in an environment of its own: the page, the commands and watched scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import streamlit

from stepscope.run import run_folders
from tests.support.server import ROOT, free_port
from tests.support.waiting import wait_until

PACKAGES = Path(streamlit.__file__).parents[1]
BLOCK = "import os, sys; sys.modules.update(dict.fromkeys(os.environ.get('BLOCKED', '-').split()))"
HOSTILE = """\
[server]
address = "0.0.0.0"
allowedHosts = ["*"]
corsAllowedOrigins = ["http://evil.example"]
enableCORS = false
enableXsrfProtection = false
baseUrlPath = "elsewhere"
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """The wheel, and the folder of the programs of the environment that it is installed in."""

    wheel: Path
    bin: Path

    @property
    def app(self) -> Path:
        return next(self.bin.parent.glob("lib/*/site-packages/stepscope/_app"))

    def run(
        self, folder: Path, *words: str, blocked: str = "-"
    ) -> subprocess.CompletedProcess[str]:
        """Run `stepscope` in a folder, without the packages in `blocked`."""
        return subprocess.run(
            [self.bin / "stepscope", *words],
            cwd=folder,
            env=environment(BLOCKED=blocked),
            capture_output=True,
            text=True,
            check=False,
        )


def environment(**variables: str) -> dict[str, str]:
    ours = ("STEPSCOPE_RUNS", "STEPSCOPE_DATA", "PYTHONPATH", "COVERAGE_PROCESS_START")
    return {name: text for name, text in os.environ.items() if name not in ours} | variables


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An sdist of the checkout, the wheel built from it, and an environment with that wheel."""
    made = tmp_path_factory.mktemp("installed")
    builder, target, dist = made / "builder", made / "target", made / "dist"
    venv.create(builder, with_pip=True)
    subprocess.run([builder / "bin" / "pip", "install", "-q", "hatchling"], check=True)
    build = [builder / "bin" / "hatchling", "build", "--directory", dist, "--target"]
    subprocess.run([*build, "sdist"], cwd=ROOT, check=True)
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        sdist.extractall(made, filter="data")
    subprocess.run([*build, "wheel"], cwd=next(made.glob("stepscope-*")), check=True)
    (wheel,) = dist.glob("*.whl")
    venv.create(target)
    (packages,) = target.glob("lib/*/site-packages")
    # Streamlit and torch as tested here. Files *.pth in that folder have no effect.
    (packages / "shared.pth").write_text(f"{PACKAGES}\n{BLOCK}\n")
    pip = [builder / "bin" / "pip", "--python", target / "bin" / "python"]
    subprocess.run([*pip, "install", "-q", "--no-deps", wheel], check=True)
    return Installed(wheel, target / "bin")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with settings of Streamlit, and with modules of the names that the page imports."""
    (tmp_path / ".streamlit").mkdir()
    (tmp_path / ".streamlit" / "config.toml").write_text(HOSTILE)
    for name in ("trainer", "dashboard", "streamlit"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the {name}.py of the folder')\n")
    return tmp_path


@contextmanager
def serving(command: list[str], folder: Path, **variables: str) -> Iterator[str]:
    """Run a server until the end of the block; yield its address once it answers."""
    port, log = free_port(), folder / "server.log"
    words = [word.format(port=port) for word in command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=environment(**variables), stdout=output, stderr=output
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answered(f"{url}/_stcore/health") or process.poll() is not None, 60)
        assert process.poll() is None, log.read_text()
        listening = {
            connection.laddr.ip
            for connection in psutil.Process(process.pid).net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        yield url
    finally:
        process.terminate()
        process.wait(20)


def answered(url: str) -> bool:
    try:
        return status(url) == 200
    except OSError:
        return False


def status(url: str, **headers: str) -> int:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_wheel_has_the_page_in_the_package_and_nothing_else(installed: Installed) -> None:
    folders = ("dashboard", "trainer", *(f"examples/{path.parent.name}" for path in RUNS))
    files = {path: f"stepscope/_app/{path}" for path in ("app.py", ".streamlit/config.toml")}
    for folder in ("stepscope", *folders):
        for path in (ROOT / folder).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and not re.search(r"(^|/)(__pycache__|\.\w+)/", name):
                files[name] = name if folder == "stepscope" else f"stepscope/_app/{name}"
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = set(wheel.namelist())
        metadata = next(name for name in names if name.endswith("/METADATA"))
        needed = wheel.read(metadata).decode().split("\n\n")[0].splitlines()
    assert {name for name in names if ".dist-info/" not in name} == set(files.values())
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {"stepscope/py.typed", "stepscope/_app/dashboard/live_chart/plotly/LICENSE"} <= names
    always = [line for line in needed if line.startswith("Requires-Dist") and "extra" not in line]
    assert {line.split()[1].partition(">")[0] for line in always} == {
        *("numpy", "psutil", "nvidia-ml-py", "msgspec")
    }


RUNS = sorted((ROOT / "examples").glob("*/run.json"))


@pytest.mark.parametrize("command", ["ui", "streamlit"])
def test_a_config_file_of_the_folder_opens_neither_address_nor_hosts(
    installed: Installed, hostile: Path, command: str
) -> None:
    words = [str(installed.bin / "stepscope"), "ui", "--port", "{port}", "--no-browser"]
    if command == "streamlit":  # Streamlit reads the config file of the folder as well
        (hostile / ".streamlit" / "config.toml").write_text(HOSTILE.replace("baseUrl", "#"))
        words = [str(installed.bin / "python"), "-P", "-m", "streamlit", "run"]
        words += [str(installed.app / "app.py"), "--server.port", "{port}"]
        words += ["--server.headless", "true"]
    with serving(words, hostile) as url:
        assert status(f"{url}/") == status(f"{url}/api/series?run=h100") == 200
        assert status(f"{url}/api/series?run=h100", Host="evil.example") == 400


def test_the_demo_opens_the_recorded_run_without_torch(
    installed: Installed, tmp_path: Path
) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}.part; mv {opened}.part {opened}\n')
    browser.chmod(0o755)
    words = [str(installed.bin / "stepscope"), "demo", "--port", "{port}"]
    more = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "STEPSCOPE_FRAMES": ""}
    more |= {"BROWSER": str(browser), "BLOCKED": "torch scipy sklearn"}
    with serving(words, tmp_path, **more) as url:
        wait_until(opened.exists, 30)
        assert opened.read_text() == f"{url}/?run=h100"
        with urllib.request.urlopen(f"{url}/api/series?run=h100") as answer:
            assert b"train/loss" in answer.read()


def test_a_watched_script_has_its_own_trainer_or_none(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import trainer; print(trainer.__file__)\n")
    done = installed.run(tmp_path, "watch", "script.py")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr
    (tmp_path / "trainer.py").touch()
    done = installed.run(tmp_path, "watch", "script.py")
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "trainer.py")), done.stderr
    assert len(list(run_folders(tmp_path / "runs"))) == 2


def test_the_commands_of_training_ignore_the_folders_modules(
    installed: Installed, hostile: Path
) -> None:
    lab = (
        "lab",
        "--workload",
        "linear",
        "--variants",
        "optimizer_impl=foreach",
        "--device",
        "cpu",
    )
    lab += ("--steps", "2", "--warmup", "1", "--max-rounds", "1", "--no-combination")
    done = installed.run(hostile, *lab)
    assert done.returncode == 0, done.stderr
    [result] = hostile.glob("runs/lab/*/sweep.json")
    assert json.loads(result.read_text())["status"] == "finished"
    assert [path.name for path in (hostile / "runs").iterdir()] == ["lab"]
