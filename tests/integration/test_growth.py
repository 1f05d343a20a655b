"""`stepscope watch` on a CPU names the script that leaks, and not the one that does not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.diagnosis.findings import findings, read_recorded
from stepscope.run import read_run, run_folders
from tests.support.child_process import run_python
from tests.support.run_values import block_of, events

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "growing.py"
WEIGHTS = 4 * (257 * 256 + 257)


WATCH = """
import sys
from stepscope.memory import growth
from stepscope.watch.main import main
growth.SCALES_S["process"] = (0.3,)  # seconds of a group: 32 of them show a trend
growth.WARM_UP_S = 2.0
sys.exit(main(sys.argv[1:]))
"""
SECONDS = "20"


def watched(runs: Path, *arguments: str) -> Path:
    """Run the script and return the folder of its run."""
    done = run_python(
        "-c", WATCH, str(SCRIPT), SECONDS, *arguments, STEPSCOPE_RUNS=str(runs), OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr
    [folder] = run_folders(runs)
    return folder


def samples(folder: Path, *keys: str) -> list[Any]:
    """Metrics of the sampler's rows, NaN where a row has none."""
    block = block_of(folder, "samples")
    return [block.mean[block.keys.index(key)] for key in keys]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run that leaks, and the one that does not."""
    root = tmp_path_factory.mktemp("growth")
    with ThreadPoolExecutor(2) as pool:
        leak = pool.submit(watched, root / "leak", "leak")
        sound = pool.submit(watched, root / "sound")
        return leak.result(), sound.result()


def told(folder: Path) -> list[str]:
    return [event.text for event in events(folder) if event.kind == "memory_growth"]


def found(folder: Path) -> list[tuple[str, str | None]]:
    every = findings(read_recorded(read_run(folder)))
    return [(one.text, one.next) for one in every if one.kind == "memory-growth"]


def test_the_leak_is_named(folders: tuple[Path, Path]) -> None:
    leak, _ = folders
    [text] = told(leak)
    assert "losses" in text
    [(finding, advice)] = found(leak)
    assert f"{finding} {advice}" == text


def test_the_sound_script_is_not(folders: tuple[Path, Path]) -> None:
    _, sound = folders
    assert (told(sound), found(sound)) == ([], [])


def test_its_parts_are_recorded(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        parameters, gradients, state, rss, children = samples(
            folder,
            "memory/parameters",
            "memory/gradients",
            "memory/optimizer_state",
            "process/rss",
            "process/children_rss",
        )
        known = np.isfinite(parameters)
        assert 8 <= known.sum() < len(known) / 3, "about once a second, of ten samples"
        assert set(parameters[known]) == {WEIGHTS}
        assert set(gradients[known]) == {WEIGHTS}
        assert state[known][-1] == 2 * WEIGHTS + 4 * 4
        assert (rss[known] > 4 * WEIGHTS).all()
        assert children[np.isfinite(children)][-1] == 0


def test_a_script_with_init_has_them_too(tmp_path: Path) -> None:
    """Model and optimizer are found; frozen weights count, and have no gradients and no state."""
    done = run_python(str(SCRIPT.with_name("initialized.py")), STEPSCOPE_RUNS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    [folder] = run_folders(tmp_path)
    keys = ("memory/parameters", "memory/gradients", "memory/optimizer_state")
    parameters, gradients, state = samples(folder, *keys)
    known = np.isfinite(parameters)
    assert known.sum() >= 2
    assert set(parameters[known]) == {4 * (65 * 32 + 33)}
    assert set(gradients[known]) == {4 * 33}
    assert set(state[known]) == {2 * 4 * 33 + 2 * 4}
