"""A sweep from plan to verdicts, with trials of a fake that knows the true effects."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.common.config_issue import ConfigError
from stepscope.lab.comparison import VariantComparison, replay_comparison
from stepscope.lab.folder import (
    METRICS,
    SWEEP_JSON,
    TRIALS_FILE,
    SweepError,
    Trial,
    read_sweep,
    read_trials,
)
from stepscope.lab.plan import Variant, write_plan
from stepscope.lab.statistics import estimate_effects
from stepscope.lab.sweep_runner import SweepRunner
from stepscope.lab.verdict_text import closing, progress_line, table
from trainer.config import RunConfig, Workload
from trainer.lab.plan import WorkloadPlan, make_variant
from trainer.training.config_validation import TrainDevice

CPU = TrainDevice(id="cpu", name="a CPU", memory_total=2**33)
CONFIG = RunConfig(workload=Workload.DIGITS_CNN, channels_last=False)

Effect = Callable[[Mapping[str, Any]], dict[str, Any]]


class FakeTaker:
    """Answers as a process would: 1000 samples/s times the effects of a job's changes."""

    def __init__(self, effects: Mapping[str, float], *, noise: float = 0.003) -> None:
        self.stopping = False
        self.jobs: list[Mapping[str, Any]] = []
        self.stop_after = math.inf
        self.answers: dict[str, Effect] = {}
        self.after: Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]] = (
            lambda job, answer: answer
        )
        self._effects = effects
        self._random = random.Random(7)
        self._noise = noise

    def take(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert timeout_s > 0
        self.jobs.append(job)
        if len(self.jobs) > self.stop_after:
            self.stopping = True
            return {"reason": "killed", "seconds": 1.0}
        rate = 1000 * math.exp(self._random.gauss(0, self._noise))
        answer: dict[str, Any] = {}
        for field, value in job["changes"].items():
            rate *= 1 + self._effects.get(field, 0.0)
            if field in self.answers:
                answer |= self.answers[field]({**job, "value": value})
        metrics = dict.fromkeys(METRICS) | {
            "samples_per_sec": rate,
            "step_time": 128 / rate,
            "peak_process": 2.0**29,
            "loss": 0.5 + 0.01 * (job["seed"] % 7),
            "loss_finite": True,
        }
        metrics |= answer.pop("metrics", {})
        answer = {"seconds": 5.0, "metrics": metrics, "machine": {"torch": "2.13"}, **answer}
        return self.after(job, answer)


def variant(**changes: Any) -> Variant:
    return make_variant(changes, CONFIG, [CPU])


def plan(*variants: Variant, **numbers: Any) -> WorkloadPlan:
    given = {"steps": 100, "warmup": 20, **numbers}
    return WorkloadPlan(config=CONFIG, variants=variants, devices=(CPU,), **given)


def sweep(folder: Path, a_plan: WorkloadPlan, taker: FakeTaker) -> dict[str, Any]:
    if not (folder / SWEEP_JSON).exists():
        write_plan(folder, a_plan)
    return SweepRunner(folder, a_plan, taker).run()


def verdicts(result: Mapping[str, Any]) -> dict[str, str]:
    return {one["name"]: one["verdict"] for one in result["variants"]}


def measured(
    folder: Path,
    effects: Mapping[str, float],
    *variants: Variant,
    answers: Mapping[str, Any] | None = None,
    noise: float = 0.003,
    **numbers: Any,
) -> dict[str, Any]:
    """Run a whole sweep; `answers` replace those of a field: a dict, or a function of the job."""
    taker = FakeTaker(effects, noise=noise)
    for field, answer in (answers or {}).items():
        taker.answers[field] = answer if callable(answer) else lambda job, a=answer: dict(a)
    return sweep(folder, plan(*variants, **numbers), taker)


WARMUP, LAST, ZERO = (
    variant(kernel_warmup=True),
    variant(channels_last=True),
    variant(set_to_none=False),
)


def test_true_effects_are_found_with_their_size(tmp_path: Path) -> None:
    taker = FakeTaker({"channels_last": 0.10, "precision": -0.20})
    a_plan = plan(LAST, variant(precision="bf16"), ZERO, variant(pin_memory=True))
    taker.answers["precision"] = lambda job: {"metrics": {"throttle": "power cap"}}
    found = sweep(tmp_path, a_plan, taker)
    assert found["status"] == "finished"
    assert verdicts(found) == {
        "channels_last": "faster",
        "precision=bf16": "slower",
        "set_to_none=false": "no_difference",
        "pin_memory": "impossible",
    }
    first = found["variants"][0]
    assert first["low"] < 0.10 < first["high"]
    assert first["resolution"] < 0.03
    assert first["rounds"] == 5
    assert first["loss"]["verdict"] == "same"
    assert found["baseline"]["metrics"]["samples_per_sec"] == pytest.approx(1000, rel=0.01)
    assert found["machine"] == {"torch": "2.13"}
    assert "power cap in 5 of " in found["throttled"]
    assert found["throttled"] in closing(found)
    assert json.loads((tmp_path / SWEEP_JSON).read_text()) == found


def test_each_round_has_all_once_in_random_order_with_one_seed(tmp_path: Path) -> None:
    taker = FakeTaker({})
    sweep(tmp_path, plan(LAST, WARMUP, max_rounds=4), taker)
    rounds = [taker.jobs[i : i + 3] for i in range(1, 13, 3)]
    orders = set()
    for jobs in rounds:
        names = [next(iter(job["changes"]), "baseline") for job in jobs]
        assert sorted(names) == ["baseline", "channels_last", "kernel_warmup"]
        orders.add(tuple(names))
        assert len({job["seed"] for job in jobs}) == 1
    assert len(orders) > 1
    assert len({jobs[0]["seed"] for jobs in rounds}) == 4


@pytest.mark.parametrize(
    ("attempts", "verdict"), [([True, True], "failed"), ([True, False], "faster")]
)
def test_a_trial_is_repeated_once(tmp_path: Path, attempts: list[bool], verdict: str) -> None:
    fails = iter([*attempts, *[False] * 99])
    crash = {"reason": "a crash", "metrics": {}}
    answers = {"kernel_warmup": lambda job: crash if next(fails) else {}}
    effects = {"kernel_warmup": 0.1}
    found = measured(tmp_path, effects, WARMUP, ZERO, answers=answers, find_best=False)
    assert verdicts(found) == {"kernel_warmup": verdict, "set_to_none=false": "no_difference"}
    first = found["variants"][0]
    assert first["reason"] == ("a crash" if verdict == "failed" else None)


@pytest.mark.parametrize("good", [0, 7])
def test_a_baseline_that_fails_ends_the_sweep_until_it_is_resumed(
    tmp_path: Path, good: int
) -> None:
    """In its first trial, the first round, and a later one; a resumed sweep starts there."""
    a_plan, taker = plan(WARMUP, max_rounds=5, find_best=False), FakeTaker({"kernel_warmup": 0.1})
    no_memory = {"reason": "CUDA is out of memory.", "seconds": 1.0}
    taker.after = lambda job, answer: (
        answer if len(taker.jobs) <= good or job["changes"] else no_memory
    )
    failed = sweep(tmp_path, a_plan, taker)
    assert failed["status"] == "failed"
    found = sweep(tmp_path, a_plan, FakeTaker({"kernel_warmup": 0.1}))
    assert (found["status"], verdicts(found)) == ("finished", {"kernel_warmup": "faster"})
    assert {one.reason for one in read_trials(tmp_path)} == {None}


def test_winners_are_combined_and_confirmed_with_fresh_seeds(tmp_path: Path) -> None:
    taker = FakeTaker({"channels_last": 0.2, "kernel_warmup": 0.1, "set_to_none": 0.0})
    found = sweep(tmp_path, plan(WARMUP, LAST, ZERO), taker)
    best = found["best"]
    assert best["variants"] == ["channels_last", "kernel_warmup"]
    assert best["verdict"] == "faster"
    assert best["low"] < 0.32 < best["high"]
    assert best["rounds"] == 12  # all of them: an early end would favor a lucky estimate
    seeds = [{job["seed"] for job in taker.jobs if len(job["changes"]) == n} for n in (1, 2)]
    assert len(seeds[1] - seeds[0]) == 0 < len(seeds[0] - seeds[1])
    confirmed = {one.round for one in read_trials(tmp_path) if one.contest == "confirm"}
    assert len(confirmed) == 12


def together(**metrics: Any) -> Effect:
    """Return an answer with these metrics for a trial of two changes."""
    return lambda job: {"metrics": metrics} if len(job["changes"]) == 2 else {}


@pytest.mark.parametrize(
    ("field", "answer", "best"),
    [
        ("kernel_warmup", together(samples_per_sec=1100.0), "channels_last"),
        ("kernel_warmup", together(loss=0.9), "channels_last"),
        ("channels_last", {"metrics": {"loss": 0.9}}, "kernel_warmup"),
        ("channels_last", {"metrics": {"loss": None, "loss_finite": False}}, "kernel_warmup"),
    ],
)
def test_the_best_one_is_neither_slower_together_nor_has_a_worse_loss(
    tmp_path: Path, field: str, answer: Any, best: str
) -> None:
    effects = {"channels_last": 0.2, "kernel_warmup": 0.1}
    found = measured(tmp_path, effects, WARMUP, LAST, answers={field: answer})
    assert (found["best"]["variants"], found["best"]["verdict"]) == ([best], "faster")
    assert found["best"]["loss"]["verdict"] == "same"
    last = found["variants"][1]
    is_worse = best != "channels_last"
    assert (last["verdict"], last["loss"]["verdict"] == "worse") == ("faster", is_worse)
    assert ("loss" in found["left_out"].get("channels_last", "")) is is_worse


def test_winners_that_exclude_each_other_are_not_combined(tmp_path: Path) -> None:
    first, second = variant(num_workers=2, prefetch_factor=4), variant(num_workers=4)
    effects = {"num_workers": 0.1, "prefetch_factor": 0.1}
    found = measured(tmp_path, effects, first, second)
    assert found["best"]["variants"] == [first.name]
    reason = "num_workers is 2 in the combination already"
    assert found["left_out"] == {second.name: reason}


def test_a_loss_that_is_not_shown_equal_is_marked_and_excludes_no_variant(tmp_path: Path) -> None:
    noise = random.Random(3)
    answers = {"kernel_warmup": lambda job: {"metrics": {"loss": 0.5 * (1 + noise.gauss(0, 0.1))}}}
    found = measured(tmp_path, {"kernel_warmup": 0.1}, WARMUP, answers=answers)
    assert found["variants"][0]["loss"]["verdict"] == "not_shown_equal"
    assert found["variants"][0]["loss"]["low"] < -0.03
    assert found["best"]["variants"] == ["kernel_warmup"]


# --- a sweep that was interrupted -----------------------------------------------------------------


def test_a_stopped_sweep_repeats_the_open_round_and_continues(tmp_path: Path) -> None:
    a_plan = plan(LAST, WARMUP, max_rounds=5)
    (tmp_path / "whole").mkdir()
    expected = sweep(tmp_path / "whole", a_plan, FakeTaker({"channels_last": 0.1}))
    (tmp_path / "parts").mkdir()
    for _ in range(100):
        taker = FakeTaker({"channels_last": 0.1})
        taker.stop_after = 5  # a round of three and a part of the next
        found = sweep(tmp_path / "parts", a_plan, taker)
        if found["status"] == "finished":
            break
        assert found["status"] == "stopped"
        assert found["variants"][0]["verdict"] in ("undecided", "faster")
    assert verdicts(found) == verdicts(expected)
    whole, parts = (
        [(one.contest, one.round, one.name) for one in read_trials(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert parts == whole
    assert found["progress"]["done"] == expected["progress"]["done"]
    assert len(read_trials(tmp_path / "parts")) == expected["progress"]["done"]


def test_half_a_line_left_by_a_kill_is_repeated_with_its_round(tmp_path: Path) -> None:
    a_plan, again = plan(LAST, max_rounds=2), FakeTaker({})
    sweep(tmp_path, a_plan, FakeTaker({}))
    path = tmp_path / TRIALS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    half = path.read_bytes()
    assert len(read_trials(tmp_path)) == 4
    assert path.read_bytes() == half  # the process of a running sweep may be writing the line
    found = sweep(tmp_path, a_plan, again)
    assert len(again.jobs) == 2
    assert found["status"] == "finished"
    assert len(read_trials(tmp_path)) == 5


RATES = {"samples_per_sec": 1.0, "step_time": 0.1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"metrics": []},
        {"seconds": None},
        {"round": "1"},
        {"reason": 5},
    ],
)
def test_a_line_with_wrong_values_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    good = {"contest": "variants", "round": 1, "name": "baseline", "seconds": 1.0, "metrics": RATES}
    (tmp_path / TRIALS_FILE).write_text(f"{json.dumps(good)}\n")
    assert read_trials(tmp_path)[0].metrics == RATES
    (tmp_path / TRIALS_FILE).write_text(f"{json.dumps(good)}\n{json.dumps({**good, **wrong})}\n")
    with pytest.raises(SweepError, match="line 2 is no trial"):
        read_trials(tmp_path)


def test_a_sweep_of_a_killed_process_reads_as_stopped(tmp_path: Path) -> None:
    here = measured(tmp_path, {}, LAST, max_rounds=1) | {"status": "running"}
    gone = here | {"pid_ticks": 1}
    elsewhere = gone | {"host": "another"}
    for content, status in (
        (here, "running"),
        (gone, "stopped"),
        (elsewhere, "running"),
        (elsewhere | {"updated": 1.0}, "stopped"),
    ):
        (tmp_path / SWEEP_JSON).write_text(json.dumps(content))
        assert read_sweep(tmp_path)["status"] == status


# --- steps and progress ---------------------------------------------------------------------------


@pytest.mark.parametrize(("step_s", "steps", "warmup"), [(0.02, 100, 25), (1.0, 30, 10)])
def test_steps_are_chosen_from_a_first_trial(
    tmp_path: Path, step_s: float, steps: int, warmup: int
) -> None:
    taker = FakeTaker({})
    taker.after = lambda job, answer: (
        answer | {"metrics": answer["metrics"] | {"step_time": step_s}}
    )
    found = sweep(tmp_path, plan(LAST, steps=0, warmup=0, max_rounds=1), taker)
    assert (taker.jobs[0]["steps"], taker.jobs[0]["warmup"]) == (30, 5)
    assert (taker.jobs[1]["steps"], taker.jobs[1]["warmup"]) == (steps, warmup)
    assert (found["plan"]["steps"], found["plan"]["warmup"]) == (steps, warmup)


def test_progress_never_promises_more_time_than_is_left(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    a_plan, taker = plan(LAST, WARMUP), FakeTaker({"channels_last": 0.2})
    write_plan(tmp_path, a_plan)
    SweepRunner(tmp_path, a_plan, taker, lambda found: seen.append(found["progress"])).run()
    totals = [one["total"] for one in seen if one["phase"] == "variants"]
    assert totals == sorted(totals, reverse=True)
    assert seen[0]["seconds_left"] is None
    assert seen[1]["seconds_left"] == 5.0 * (totals[0] - 1)
    assert (seen[-1]["done"], seen[-1]["total"], seen[-1]["seconds_left"]) == (
        len(taker.jobs),
    ) * 2 + (0.0,)


# --- comparisons ----------------------------------------------------------------------------------


def test_a_variant_is_compared_with_the_geometric_mean_of_the_baselines() -> None:
    rates = {"baseline": 500.0, "baseline 2": 2000.0, "variant": 1000.0}
    others = {"loss": 1.0, "loss_finite": True}
    trials = [
        Trial(
            contest="variants", round=number, name=name, metrics={"samples_per_sec": rate} | others
        )
        for number in (1, 2)
        for name, rate in rates.items()
    ]
    comparison = VariantComparison("variants", "baseline", ("variant",), 2)
    state = replay_comparison(comparison, trials, plan(max_rounds=2).rules, seed=0)
    assert state.next is None
    assert state.speed["variant"].effect == pytest.approx(0)


def test_plans_survive_json_and_reject_invalid_values() -> None:
    a_plan = plan(LAST, variant(pin_memory=True))
    assert WorkloadPlan.from_dict(json.loads(json.dumps(a_plan.to_dict()))) == a_plan
    for wrong in (
        {"max_rounds": 0},
        {"steps": -1},
        {"seed": 1.5},
    ):
        with pytest.raises(ConfigError):
            replace(a_plan, **wrong)
    with pytest.raises(ConfigError, match="baseline"):
        plan(replace(WARMUP, name="baseline 2"))
    with pytest.raises(ConfigError, match="twice"):
        plan(WARMUP, WARMUP)


# --- reports --------------------------------------------------------------------------------------


def test_values_that_are_not_finite_are_missing_in_the_files(tmp_path: Path) -> None:
    answers = {
        "kernel_warmup": {"metrics": {"data_wait": math.nan, "mfu": math.inf}},
        "channels_last": {"metrics": {"samples_per_sec": math.inf}},
    }
    found = measured(tmp_path, {}, WARMUP, LAST, answers=answers, max_rounds=1)
    assert found["variants"][0]["metrics"]["data_wait"] is None
    assert verdicts(found)["channels_last"] == "failed"
    assert found["variants"][1]["reason"].startswith("samples_per_sec: must be a number above 0")
    for name in (TRIALS_FILE, SWEEP_JSON):
        assert "NaN" not in (tmp_path / name).read_text()


def test_reports_escape_the_texts_of_a_foreign_folder(tmp_path: Path) -> None:
    script = "alert(1)\x1b[2J"
    answers = {"kernel_warmup": {"reason": script, "metrics": {}}}
    evil = replace(WARMUP, name='=cmd()"<b>')
    found = measured(
        tmp_path, {"channels_last": 0.1}, evil, LAST, variant(pin_memory=True), answers=answers
    )
    assert "\x1b" not in "".join([*table(found), *closing(found), progress_line(found)])


def test_a_decided_variant_keeps_its_share_and_its_variance() -> None:
    noise = random.Random(5)
    samples = []
    for number in range(1, 9):
        for name in ("baseline", "same", "open"):
            rate = 1000.0 * (1 + (0.03 + noise.gauss(0, 0.02)) * (name == "open"))
            metrics = {"samples_per_sec": rate, "loss": 1.0, "loss_finite": True}
            samples.append(Trial(contest="variants", round=number, name=name, metrics=metrics))
    rules = plan().rules
    comparison = VariantComparison("variants", "baseline", ("same", "open"))
    state = replay_comparison(comparison, samples, rules, seed=0)
    assert not state.is_open("same")
    assert state.speed["same"].rounds == 5
    ratios = [math.log(one.metrics["samples_per_sec"] / 1000) for one in samples[2::3]]
    kept = estimate_effects({"same": [0.0] * 8, "open": ratios}, rules)["open"]
    found = state.speed["open"]
    assert (found.low, found.high) == (pytest.approx(kept.low), pytest.approx(kept.high))
