"""`stepscope compare`: what it prints, refuses and returns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli import main
from tests.support.child_process import ROOT
from tests.support.recorded_runs import write_run


def record(root: Path, run: str, seconds: float, /, **run_json: Any) -> None:
    values = {"perf/step_time": seconds, "perf/samples_per_sec": 32 / seconds, "train/loss": 0.5}
    rows = [(seconds * step, step, values) for step in range(1, 41)]
    content = {"kind": "init", "name": "job", "config": {"lr": 0.1}, "step": 40} | run_json
    memory = [(1.0, 1, {"process/rss": 100.0})]
    write_run(root / run, content, steps=rows, samples=memory)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three runs of a baseline, and three of each of two changes."""
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path))
    for number, noise in enumerate((0.999, 1.0, 1.001)):
        record(tmp_path, f"base{number}", 0.1 * noise)
        record(tmp_path, f"slow{number}", 0.12 * noise, config={"lr": 0.2})
        record(tmp_path, f"same{number}", 0.1 * (2 - noise))
    return tmp_path


def sides(base: str, new: str, count: int = 3) -> list[str]:
    names = [[f"{side}{number}" for number in range(count)] for side in (base, new)]
    return ["compare", *names[0], "--to", *names[1]]


@pytest.mark.parametrize(("new", "code"), [("same", 0), ("slow", 4)])
def test_a_gate_decides_the_exit_code(
    new: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    gates = ["--gate", "step_time:+3%", "--gate", "peak_memory:+5%"]
    assert main([*sides("base", new), *gates]) == code
    text = capsys.readouterr().out
    assert f"(exit code {code})" in text
    assert ("lr: 0.1 → 0.2" in text) == (new == "slow")
    assert main(sides("base", new)) == 0, "without a gate"


def test_one_pair_is_inconclusive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*sides("base", "slow", 1), "--gate", "step_time:+3%"]) == 3
    text = capsys.readouterr().out
    assert "run-to-run variation" in text
    assert "+20" in text.partition("Step time")[2].partition("\n")[0], "the numbers are shown"


def test_json_has_the_comparison_and_the_sides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*sides("base", "slow"), "--json", "--gate", "step_time:+3%"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert (found["base"], len(found["runs"]), found["verdict"]) == (3, 6, "regression")
    row = next(row for row in found["sides"] if row["key"] == "step_time")
    assert row["low"] < 0.2 < row["high"] < 0.21
    assert row["is_different"]


def test_other_work_is_refused_unless_forced(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(root, "other", 0.1, name="another job")
    assert main(["compare", "base0", "--to", "other"]) == 2
    assert "another job" in capsys.readouterr().err
    assert main(["compare", "base0", "--to", "other", "--force"]) == 0
    assert "another job" in capsys.readouterr().out


def test_a_run_counts_once_by_all_its_names(root: Path, tmp_path_factory: Any) -> None:
    (root / "link").symlink_to(root / "base0")
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "runs"
    elsewhere.symlink_to(root)
    for other in ("link", str(root / "base0"), str(elsewhere / "base0"), str(root / "link")):
        assert main(["compare", "base0", other, "--to", "slow0"]) == 2
        assert main(["compare", "base0", "--to", "slow0", other]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["base0", "--to", "base0"],
        ["base0", "--to", "unknown"],
        ["base0", "--to", "slow0", "--gate", "energy:+1%"],
    ],
)
def test_wrong_usage_is_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_the_examples_of_the_document_run(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("base3", "new1", "new2", "new3"):
        record(root, name, 0.1 if name == "base3" else 0.12, config={"lr": 0.3})
    text = (ROOT / "docs/compare.md").read_text()
    (command,) = re.findall(r"^    stepscope (compare .+)$", text, flags=re.M)
    assert main(command.split()) in (3, 4)
    (program,) = re.findall(r"^```python\n(.+?)^```$", text, flags=re.M | re.S)
    capsys.readouterr()
    exec(compile(program, "compare.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "lr ('0.1', '0.1', '0.3', '0.3')" in printed
    assert re.search(r"^Step time 0\.1\d+ 0\.\d+ 0\.\d+$", printed, flags=re.M)
