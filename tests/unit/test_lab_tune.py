"""The time budget of `stepscope tune` in simulated sweeps, and its options."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli import tune
from stepscope.lab.command import USAGE
from stepscope.lab.folder import METRICS, read_trials
from stepscope.lab.patch import ManualChange, Patch, write_patch
from stepscope.lab.plan import write_plan
from stepscope.lab.script_plan import TunePlan, parse_variant, script_command
from stepscope.lab.sweep_runner import SweepRunner

NAMES = ("fused", "bf16", "channels_last", "num_workers=2", "num_workers=2 persistent_workers")
ENTRY = {"value": True, "lines": ["a"], "places": []}


def probed(word: str) -> dict[str, Any]:
    """Return the entry of a setting in the first trial, without workers in the script."""
    name, _, value = word.partition("=")
    refused = name in ("bf16", "persistent_workers")
    state = {"state": "refused" if refused else "applies", "text": "not here" if refused else ""}
    return {**ENTRY, "name": name, "value": int(value) if value else True, **state}


class SimulatedTrials:
    """Trials of 4 s with noise; the first one shows that `bf16` does not apply."""

    stopping = False
    noise = 0.012

    def __init__(self, effects: Mapping[str, float], seed: int) -> None:
        self._effects, self._random = effects, random.Random(seed)
        self.seconds, self.names = 0.0, []
        self.slow = -1  # number of a trial of 60 s

    def take(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        changes = [name.removeprefix("with:") for name in job["changes"]]
        seconds = 60.0 if len(self.names) == self.slow else 4.0
        self.seconds += seconds
        self.names.append(changes)
        late = {**ENTRY, "name": "channels_last", "state": "refused", "text": "the default"}
        if "channels_last" in changes:  # seen only when it is applied
            return {"reason": "channels_last refused", "settings": [late], "seconds": 4.0}
        rate = 100 * math.exp(self._random.gauss(0, self.noise))
        rate *= math.prod(1 + self._effects.get(name, 0.0) for name in changes)
        values = {"samples_per_sec": rate, "step_time": 1 / rate, "loss": 0.5, "loss_finite": True}
        entries = [{**ENTRY, "name": one, "state": "in effect", "text": ""} for one in changes]
        metrics = dict.fromkeys(METRICS) | values
        if "probe" in job:
            metrics["steps"] = 110
            entries = [probed(word) for word in job["probe"]]
        return {"seconds": seconds, "metrics": metrics, "machine": {}, "settings": entries}


def tuned(
    folder: Path,
    effects: Mapping[str, float],
    seed: int = 0,
    minutes: float = 8,
    names: Sequence[str] = NAMES,
    slow: int = -1,
) -> tuple[dict[str, Any], SimulatedTrials]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text("import torch\n")
    script = script_command(str(folder / "train.py"), [], is_module=False)
    folder /= "sweep"
    plan = TunePlan(
        script=script,
        variants=tuple(map(parse_variant, names)),
        minutes=minutes,
        steps=100,
        warmup=10,
    )
    write_plan(folder, plan)
    trials = SimulatedTrials(effects, seed)
    trials.slow = slow
    sweep = SweepRunner(folder, plan, trials).run()  # type: ignore[arg-type]
    write_patch(folder, plan, sweep)
    return sweep, trials


def test_a_planted_gain_is_found_within_the_budget(tmp_path: Path) -> None:
    sweep, trials = tuned(tmp_path, {"num_workers": 0.5, "fused": 0.2})
    assert set(sweep["best"]["variants"]) >= {"fused"}
    assert sweep["best"]["low"] < 0.8 < sweep["best"]["high"]
    assert trials.seconds <= 8 * 60
    assert trials.names.count(["bf16"]) == 0
    assert trials.names.count(["channels_last"]) == 1  # a refusal is final
    verdicts = {one["name"]: one["verdict"] for one in sweep["variants"]}
    assert verdicts["num_workers=2 persistent_workers"] != "impossible"  # it brings the workers
    trials = read_trials(tmp_path / "sweep")
    first = [one.name for one in trials if (one.contest, one.round) == ("variants", 2)]
    assert len(first) == 2 + 3, "the baseline twice, for three settings"
    assert json.loads((tmp_path / "sweep/patch.json").read_text())["by_hand"]


def test_no_gain_is_found_where_none_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is far above the minimum effect; `test_lab_statistics` counts the errors."""
    monkeypatch.setattr(SimulatedTrials, "noise", 0.1)
    for seed in range(6):
        sweep, trials = tuned(tmp_path / str(seed), {}, seed, minutes=4)
        assert sweep["best"] is None or sweep["best"]["verdict"] != "faster"
        assert trials.seconds <= 4 * 60
        assert json.loads((tmp_path / str(seed) / "sweep/patch.json").read_text())["diff"] == ""


def test_a_short_budget_leaves_settings_undecided(tmp_path: Path) -> None:
    sweep, trials = tuned(tmp_path, {"fused": 0.01}, minutes=3)
    # Only a confirmation of 5 rounds of 8 s is reserved.
    assert 100 < trials.seconds <= 180 - 40
    reasons = [one["reason"] for one in sweep["variants"] if one["verdict"] == "undecided"]
    assert reasons
    assert all("within the time" in reason for reason in reasons)


def test_one_setting_is_measured_whatever_the_budget(tmp_path: Path) -> None:
    sweep, trials = tuned(tmp_path, {"fused": 0.5}, minutes=1)
    assert (sweep["status"], sweep["best"]["variants"]) == ("finished", ["fused"])
    # The first trial, 3 rounds of 2, and 5 of 2 that confirm need 68 s.
    assert trials.seconds >= 68
    assert ["num_workers=2"] not in trials.names


@pytest.mark.parametrize(("minutes", "measured"), [(2.3, 4), (2.2, 3), (1.2, 1)])
def test_the_last_settings_are_left_out_of_a_short_budget(
    tmp_path: Path, minutes: float, measured: int
) -> None:
    sweep, trials = tuned(tmp_path, {"fused": 0.5}, minutes=minutes)
    assert (sweep["status"], trials.seconds <= 60 * minutes) == ("finished", True)
    left_out = [f"to fit in {minutes:g} minutes" in str(one["reason"]) for one in sweep["variants"]]
    assert sum(left_out) == 4 - measured
    assert left_out == sorted(left_out)


def test_compile_is_left_out_of_a_short_budget(tmp_path: Path) -> None:
    names = ("fused", "compile")
    sweep, trials = tuned(tmp_path, {"fused": 0.5}, minutes=2, names=names)
    assert ["compile"] not in trials.names
    assert "2 minutes" in sweep["variants"][1]["reason"]
    assert sweep["best"]["variants"] == ["fused"]
    assert ["compile"] in tuned(tmp_path / "long", {}, minutes=5, names=names)[1].names


def test_the_result_has_the_gain_and_what_to_change(tmp_path: Path) -> None:
    sweep, _ = tuned(tmp_path, {"fused": 0.5})
    best = sweep["best"]
    best["baseline"]["peak_process"], best["metrics"]["peak_process"] = 100.0, 103.0
    sweep["baseline"]["metrics"]["peak_process"] = 50.0  # of other rounds
    by_hand = [ManualChange("fused", ["SGD(..., fused=True)"], "model.py, line 3")]
    lines = tune.result_lines(sweep, Patch("--- a\n+++ b\n@@ @@\n+one\n+two\n", by_hand))
    assert f"{1 + best['effect']:.2f} × faster [" in lines[0]
    assert "peak memory +3.0%" in lines[0]
    assert {"+two", "    SGD(..., fused=True)", "  bf16: not here"} <= {*lines}


def test_wrong_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for option, *values in (
        ("--apply", "train.py", "no/new.py"),
        ("--settings", "", "tf32,env:A=1", "num_workers", "tf32 tf32"),
    ):
        for value in values:
            assert tune.main([option, value, "train.py"]) == USAGE
            assert f"{option}: " in capsys.readouterr().err
    for minutes in ("0", "nan", "1e9"):
        with pytest.raises(SystemExit):
            tune.main(["--minutes", minutes, "train.py"])
        assert "--minutes: must be 0.1 to 10000" in capsys.readouterr().err


def test_a_combination_with_a_worse_confirmed_loss_has_no_patch(tmp_path: Path) -> None:
    sweep, _ = tuned(tmp_path, {"fused": 0.5})
    sweep["best"]["loss"] |= {"verdict": "worse", "text": "loss higher by 10.0%"}
    lines = tune.result_lines(sweep, Patch("", []))
    assert lines[0].startswith("Not confirmed: fused: faster by ")
    assert lines[0].endswith("; loss higher by 10.0%.")
