"""Gates: parsing, verdicts on simulated sweeps with drift, exit codes, the table."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest

from stepscope.cli import lab
from stepscope.lab import script_trial
from stepscope.lab.folder import Trial
from stepscope.lab.gate import (
    Gate,
    GateVerdict,
    check_gates,
    parse_gate,
    worst,
)
from stepscope.lab.script_plan import ScriptCommand, ScriptPlan, parse_variant

SCRIPT = ScriptCommand(
    target="t.py", is_module=False, arguments=(), cwd="/", python="python", sha256=None
)
SPREAD = 0.012


def plan(*variants: str, rounds: int = 12) -> ScriptPlan:
    return ScriptPlan(
        script=SCRIPT, variants=tuple(map(parse_variant, variants)), max_rounds=rounds
    )


def sweep(made: ScriptPlan, slower: float, seed: int) -> list[Trial]:
    """Return trials of a machine that gets 6% slower, whose processes differ by SPREAD."""
    random = np.random.default_rng(seed)
    names = ["baseline", *(variant.name for variant in made.variants)]
    return [
        Trial(
            contest="variants",
            round=number,
            name=name,
            metrics={
                "step_time": 0.01
                * (1 + 0.06 * number / made.max_rounds)
                * (1 if name == "baseline" else 1 + slower)
                * float(np.exp(random.normal(0, SPREAD))),
                "peak_allocated": None,
                "peak_process": 1e9,
            },
        )
        for number in range(1, made.max_rounds + 1)
        for name in names
    ]


@pytest.mark.parametrize(
    "text", ["step_time", "step_time:3", "loss:+1%", "step_time:-3%", "step_time:+nan%", ""]
)
def test_a_gate_names_a_metric_and_a_percentage(text: str) -> None:
    assert parse_gate("energy:2.5%") == Gate("energy", 0.025)
    with pytest.raises(ValueError, match="METRIC"):
        parse_gate(text)


@pytest.mark.parametrize(
    ("slower", "verdict", "least"),
    [
        (0.0, GateVerdict.PASSED, 190),
        (0.05, GateVerdict.REGRESSION, 180),
        (0.10, GateVerdict.REGRESSION, 200),
        (0.03, GateVerdict.INCONCLUSIVE, 180),
    ],
)
def test_of_200_sweeps_with_a_limit_of_3_percent(
    slower: float, verdict: GateVerdict, least: int
) -> None:
    made, gates = plan("new: --new"), [Gate("step_time", 0.03)]
    found = [check_gates(made, sweep(made, slower, seed), gates)[0].verdict for seed in range(200)]
    assert found.count(verdict) >= least
    if slower < 0.03:
        assert GateVerdict.REGRESSION not in found


def test_equal_memory_passes_and_one_round_or_no_value_is_inconclusive() -> None:
    made = plan("new: --new", "old: --old")
    trials = sweep(made, 0.0, 1)
    gates = [Gate("peak_memory", 0.0), Gate("energy", 0.05)]
    memory, _, energy, _ = check_gates(made, trials, gates)
    assert (memory.verdict, memory.low, memory.high) == (GateVerdict.PASSED, 0.0, 0.0)
    assert (energy.verdict, energy.rounds, energy.change) == (GateVerdict.INCONCLUSIVE, 0, None)
    one_round = [trial for trial in trials if trial.round == 1]
    assert check_gates(made, one_round, gates)[0].verdict is GateVerdict.INCONCLUSIVE
    assert worst([memory, energy]) is GateVerdict.INCONCLUSIVE


def test_a_variant_with_another_pythonpath_keeps_its_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two versions of the user's code are compared by PYTHONPATH."""
    given: list[str] = []
    monkeypatch.setattr(
        "subprocess.call", lambda *_, env, **__: given.append(env["PYTHONPATH"]) or 0
    )
    monkeypatch.setenv("PYTHONPATH", "/stepscope:/base")
    job = {"seed": 1, "warmup": 1, "steps": 1, "temporary": "/tmp"}
    for name, changes in (("a", {}), ("b", {"env:PYTHONPATH": "/new:/more"})):
        (tmp_path / name).mkdir()
        script_trial._run(SCRIPT, {**job, "changes": changes}, tmp_path / name)
    assert given == ["/base:/stepscope", "/new:/more:/stepscope"]


def test_the_documented_ci_step_has_the_exit_code_of_the_gate(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/gate.md").read_text()
    (block,) = re.findall(r"run: \|\n((?: {10}.*\n)+)", text)
    step = textwrap.dedent(block)
    assert "GITHUB_STEP_SUMMARY" in step
    stubs = "git() { :; }\nstepscope() { echo '| new |'; return 4; }\n"
    environment = os.environ | {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    done = subprocess.run(["bash", "-c", stubs + step], env=environment, capture_output=True)
    assert done.returncode == 4
    assert (tmp_path / "summary.md").read_text() == "| new |\n"


@pytest.mark.parametrize("option", ["--max-rounds", "--steps"])
def test_one_round_or_one_step_is_wrong_usage(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(lab, "SweepRunner", None)
    (tmp_path / "t.py").touch()
    argv = ["--gate", "energy:+3%", "--folder", str(tmp_path / "sweep"), option, "1"]
    argv += ["--variant", "new: --new", str(tmp_path / "t.py")]
    assert lab.main(argv) == 2
    assert capsys.readouterr().err.startswith(f"{option}: must be at least 2")


def test_a_metric_without_values_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan("new: --new")
    monkeypatch.setattr(lab, "read_trials", lambda _: sweep(made, 0.0, 1))
    found = {
        metric: lab._report_gates(tmp_path, made, {"variants": []}, [Gate(metric, 0.05)])
        for metric in ("energy", "step_time")
    }
    assert found == {"energy": 1, "step_time": 0}
    assert "energy was not measured" in capsys.readouterr().err
