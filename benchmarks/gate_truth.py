"""Does a gate find planted slowdowns, and only those? Whole sweeps on a drifting machine, counted.

    python -m benchmarks.gate_truth --out DIR [--sweeps 20] [--revisions 5] [--clones DIR]

A sweep compares four variants of `gate_truth_script.py` with its baseline: steps that take 0, 3, 5
and 10 % longer, under a gate of `step_time:+3%`. Over the sweep the machine seems to become 6 %
slower. Parts: `arguments`, `revisions` (the slowdown is in the code of another commit), and with
`--clones` (see `tune_scripts.py`) two public scripts that compute on all cores. On the same steps,
Welch's t-test compares the runs of each round. DIR has the sweeps and a JSON file for each; a
second call continues. Targets: 5 and 10 % are a regression in 18 of 20 sweeps, 0 % in at most 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks import gate_truth_script
from benchmarks.report import at_least, at_most, report, say
from benchmarks.tune_scripts import SCRIPTS, unpack
from stepscope.lab.folder import Trial, read_trials
from stepscope.lab.gate import Gate, GateVerdict, check_gates
from stepscope.lab.plan import Variant
from stepscope.lab.script_plan import ScriptPlan, parse_variant, script_command
from stepscope.lab.sweep_runner import SweepRunner
from stepscope.lab.sweep_state import BASELINE
from stepscope.lab.trial_process import TrialProcess

SLOW = (0.0, 0.03, 0.05, 0.10)
LIMIT, DRIFT = 0.03, 0.06
FOUND_AT_LEAST, FALSE_AT_MOST = 18 / 20, 1 / 20
ROUNDS, STEPS, WARMUP = 5, 60, 30
SCRIPT = "train.py"
ARGUMENTS, REVISIONS = "arguments", "revisions"
PUBLIC = ("nanoGPT", "minGPT adder")
"""Scripts of tune_scripts.py."""


def name_of(slow: float) -> str:
    """Return the name of a slowdown, also of its tag."""
    return f"slow-{round(100 * slow)}"


def create_repository(folder: Path) -> None:
    """Create a repository with the script; its tags differ in the slowdown."""
    if (folder / ".git").is_dir():
        return
    folder.mkdir(parents=True)
    text = Path(gate_truth_script.__file__).read_text("utf-8")

    def git(*words: str) -> None:
        identity = ("-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
        subprocess.run(["git", *identity, *words], cwd=folder, check=True)

    git("init", "--quiet", "--initial-branch=main")
    for slow in (*SLOW[1:], *SLOW[:1]):  # the working tree is the script without a slowdown
        new = text.replace("SLOW = 0.0\n", f"SLOW = {slow}\n")
        (folder / SCRIPT).write_text(new, "utf-8")
        git("add", SCRIPT)
        git("commit", "--quiet", "-m", name_of(slow))
        git("tag", name_of(slow))


def variants(part: str) -> tuple[Variant, ...]:
    """Return the slowdowns as variants. The current folder must be the repository."""
    if part == REVISIONS:
        return tuple(parse_variant(f"rev:{name_of(slow)}") for slow in SLOW)
    return tuple(parse_variant(f"{name_of(slow)}: --slow {slow}") for slow in SLOW)


def sweep(part: str, words: Sequence[str], folder: Path, seed: int) -> dict[str, Any]:
    """Run one sweep; return the gate's and the t-test's result for each slowdown."""
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was ended
    folder.mkdir(parents=True)
    compared = variants(part)
    arguments = [] if part == REVISIONS else ["--slow", "0", *words]
    plan = ScriptPlan(
        script=script_command(SCRIPT, arguments, is_module=False),
        variants=compared, steps=STEPS, warmup=WARMUP, max_rounds=ROUNDS, looks=(ROUNDS,),
        find_best=False, seed=seed,
    )  # fmt: skip
    trials = ROUNDS * (len(compared) + plan.baselines)
    os.environ[gate_truth_script.FOLDER] = str(folder)
    os.environ[gate_truth_script.DRIFT] = str(DRIFT / trials)
    began, load = time.monotonic(), os.getloadavg()[0]
    found = SweepRunner(folder, plan, TrialProcess("stepscope.lab.script_trial", folder)).run()
    failed = [variant["reason"] for variant in found["variants"] if variant["verdict"] == "failed"]
    if found["status"] != "finished" or failed:
        raise SystemExit(f"{folder}: the sweep {found['status']}: {found['reason'] or failed}")
    samples = read_trials(folder)
    results = check_gates(plan, samples, [Gate("step_time", LIMIT)])
    different = t_tests(folder, samples)
    return {
        "seconds": time.monotonic() - began,
        "load": load,
        "spread": spread(samples),
        "slowdowns": {
            name_of(slow): asdict(result) | {"t_test": different[result.variant]}
            for slow, result in zip(SLOW, results, strict=True)
        },
    }


def spread(samples: Sequence[Trial]) -> float | None:
    """Return the standard deviation of two baseline runs of one round, as a fraction."""
    rounds: dict[int, list[float]] = {}
    for one in samples:
        if one.ok and one.name.startswith(BASELINE):
            rounds.setdefault(one.round, []).append(np.log(one.metrics["step_time"]))
    within = [statistics.variance(values) for values in rounds.values() if len(values) > 1]
    return float(np.sqrt(statistics.mean(within))) if within else None


def t_tests(folder: Path, samples: Sequence[Trial]) -> dict[str, list[bool]]:
    """Return, for each variant and round, whether the steps of one run each differ (p < 5 %)."""
    steps = {
        (one.round, one.name): np.fromfile(folder / f"steps-{number}")[WARMUP:]
        for number, one in enumerate(samples)
    }
    return {
        name: [
            bool(stats.ttest_ind(steps[number, BASELINE], values, equal_var=False).pvalue < 0.05)
            for (number, other), values in steps.items()
            if other == name
        ]
        for name in dict.fromkeys(one.name for one in samples)
        if not name.startswith(BASELINE)
    }


def row(part: str, slow: float, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of one slowdown over the sweeps of a part."""
    found = [one["slowdowns"][name_of(slow)] for one in results]
    tests = [different for one in found for different in one["t_test"]]
    inside = [one["low"] <= slow <= one["high"] for one in found]
    return {
        "part": part,
        "planted": slow,
        "sweeps": len(found),
        **{
            str(verdict): sum(one["verdict"] == verdict for one in found) for verdict in GateVerdict
        },
        "change": statistics.median(one["change"] for one in found),
        "half_width": statistics.median((one["high"] - one["low"]) / 2 for one in found),
        "inside": sum(inside),
        "t_tests": len(tests),
        "t_different": sum(tests),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| Part | Planted | Sweeps | Regression | Inconclusive | Passed | Change (median) "
        "| Interval has it | t-test: different |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one['part']} | {one['planted']:.0%} | {one['sweeps']} | {one['regression']} "
        f"| {one['inconclusive']} | {one['passed']} "
        f"| {one['change']:+.1%} ± {one['half_width']:.1%} | {one['inside']} "
        f"| {one['t_different']} of {one['t_tests']} |"
        for one in rows
    ]
    return "\n".join(lines)


def measure(out: Path, counts: dict[str, int], words: dict[str, list[str]]) -> dict[str, Any]:
    """Run the sweeps that have no result yet; return counts, targets and the sweeps."""
    rows, sweeps = [], {}
    for part, count in counts.items():
        results = []
        for number in range(count):
            name = f"{part.replace(' ', '-')}-{number:02}"
            file = out / f"{name}.json"
            if not file.is_file():
                found = sweep(part, words.get(part, []), out / name, 1000 * number)
                file.write_text(json.dumps(found, indent=1), "utf-8")
                shutil.rmtree(out / name)
            results.append(json.loads(file.read_text("utf-8")))
            say(f"{name}: {[one['verdict'] for one in results[-1]['slowdowns'].values()]}")
        sweeps[part] = [{key: one[key] for key in ("seconds", "load", "spread")} for one in results]
        rows += [row(part, slow, results) for slow in SLOW if results]
    targets = {}
    for one in rows:
        share, key = one["regression"] / one["sweeps"], f"{one['part']} {one['planted']:.0%}"
        if one["planted"] > LIMIT and one["part"] in (ARGUMENTS, REVISIONS):
            targets[key] = at_least(share, FOUND_AT_LEAST)
        elif not one["planted"]:
            targets[key] = at_most(share, FALSE_AT_MOST)
    return {"targets": targets, "rows": rows, "sweeps": sweeps}


def main() -> None:
    """Measure; print the table, and one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--sweeps", type=int, default=20, help="with arguments as variants")
    parser.add_argument("--revisions", type=int, default=5, help="sweeps with revisions")
    parser.add_argument("--public", type=int, default=5, help="sweeps of each public script")
    parser.add_argument("--clones", type=Path, help="folder with clones of the public scripts")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    out = options.out.resolve()
    counts = {ARGUMENTS: options.sweeps, REVISIONS: options.revisions}
    words = {}
    if options.clones:
        counts |= dict.fromkeys(PUBLIC, options.public)
        for part in PUBLIC:
            script = SCRIPTS[part]
            folder = unpack(script, options.clones.resolve(), out / "public" / part)
            words[part] = [str(folder), script.file, *script.arguments]
    create_repository(out / "repository")
    os.chdir(out / "repository")
    results = measure(out, counts, words)
    print(table(results["rows"]))
    report("gate_truth", {key: str(value) for key, value in vars(options).items()}, load, results)


if __name__ == "__main__":
    main()
