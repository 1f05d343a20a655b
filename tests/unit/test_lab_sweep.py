"""A sweep from plan to verdicts, with trials of a fake that knows the true effects."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from stepscope.common.config_issue import ConfigError
from stepscope.lab.comparison import NextTrial, VariantComparison, replay_comparison
from stepscope.lab.folder import (
    METRICS,
    SAMPLES,
    SWEEP_JSON,
    SweepError,
    Trial,
    read_samples,
    read_sweep,
)
from stepscope.lab.plan import Variant, write_plan
from stepscope.lab.report import closing, progress_line, table, to_csv
from stepscope.lab.statistics import estimate_effects
from stepscope.lab.sweep_runner import SweepRunner, seed_of, with_steps
from stepscope.lab.sweep_state import confirming_rules, rules_of
from trainer.config import RunConfig, Workload
from trainer.config_validation import TrainDevice
from trainer.lab.plan import WorkloadPlan, make_variant

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
NO_LOSS = {"metrics": {"loss": None, "loss_finite": False}}


def test_true_effects_are_found_with_their_size(tmp_path: Path) -> None:
    taker = FakeTaker({"channels_last": 0.10, "precision": -0.20})
    a_plan = plan(LAST, variant(precision="bf16"), ZERO, variant(pin_memory=True))
    found = sweep(tmp_path, a_plan, taker)
    assert found["status"] == "finished"
    assert verdicts(found) == {
        "channels_last": "faster",
        "precision=bf16": "slower",
        "set_to_none=false": "no_difference",
        "pin_memory": "impossible",
    }
    assert "pinned memory" in found["variants"][3]["reason"]
    assert not any("pin_memory" in job["changes"] for job in taker.jobs)
    first = found["variants"][0]
    assert first["low"] < 0.10 < first["high"]
    assert first["resolution"] < 0.03
    assert first["rounds"] == 5
    assert first["text"].startswith("faster by ")
    assert first["loss"]["verdict"] == "same"
    assert found["baseline"]["metrics"]["samples_per_sec"] == pytest.approx(1000, rel=0.01)
    assert found["machine"] == {"device": "a CPU", "torch": "2.13"}
    assert json.loads((tmp_path / SWEEP_JSON).read_text()) == found


def test_each_round_has_all_once_in_random_order_with_one_seed(tmp_path: Path) -> None:
    taker = FakeTaker({})
    sweep(tmp_path, plan(LAST, WARMUP, max_rounds=4), taker)
    rounds = [taker.jobs[i : i + 3] for i in range(0, 12, 3)]
    orders = set()
    for jobs in rounds:
        names = [next(iter(job["changes"]), "baseline") for job in jobs]
        assert sorted(names) == ["baseline", "channels_last", "kernel_warmup"]
        orders.add(tuple(names))
        assert len({job["seed"] for job in jobs}) == 1
    assert len(orders) > 1
    assert len({jobs[0]["seed"] for jobs in rounds}) == 4


def test_a_decided_variant_drops_out(tmp_path: Path) -> None:
    effects = {"channels_last": 0.3, "set_to_none": 0.02}
    found = measured(tmp_path, effects, LAST, ZERO, noise=0.012, find_best=False)
    assert [one["rounds"] for one in found["variants"]] == [5, 12]
    assert found["rounds"][5]["order"] != found["rounds"][4]["order"]
    assert "channels_last" not in found["rounds"][5]["order"]


def fails(*attempts: bool) -> Callable[[Any], dict[str, Any]]:
    """Return answers that fail where `attempts`, repeated for ever, has True."""
    failures = itertools.cycle(attempts)
    return lambda job: {"reason": "a crash", "metrics": {}} if next(failures) else {}


@pytest.mark.parametrize(
    ("answers", "verdict", "rounds", "reason"),
    [
        (fails(True), "failed", 0, "a crash"),  # twice in its round
        (fails(True, False), "failed", 0, "3 of 5 processes failed: a crash"),  # in three rounds
        (fails(True, *[False] * 99), "faster", 5, "1 of 6 processes failed: a crash"),
    ],
)
def test_a_variant_whose_processes_fail_has_a_reason(
    tmp_path: Path, answers: Any, verdict: str, rounds: int, reason: str
) -> None:
    given = {"kernel_warmup": answers}
    effects = {"kernel_warmup": 0.1}
    found = measured(tmp_path, effects, WARMUP, ZERO, answers=given, find_best=False)
    assert verdicts(found) == {"kernel_warmup": verdict, "set_to_none=false": "no_difference"}
    first = found["variants"][0]
    assert (first["rounds"], first["reason"]) == (rounds, reason)
    assert (f"kernel_warmup: {reason}" in closing(found)) is (verdict == "faster")
    trial = found["rounds"][0]["samples"]["kernel_warmup"]
    assert trial["failures"] == ["a crash"] * (2 if reason == "a crash" else 1)


def test_stalls_that_the_median_excludes_are_a_note(tmp_path: Path) -> None:
    taker = FakeTaker({}, noise=0.002)

    def stalled(job: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        stalls = 0.8 if "kernel_warmup" in job["changes"] else 1.0
        mean = stalls * answer["metrics"]["samples_per_sec"]
        return answer | {"metrics": answer["metrics"] | {"mean_samples_per_sec": mean}}

    taker.after = stalled
    found = sweep(tmp_path, plan(WARMUP, ZERO), taker)
    assert [one["verdict"] for one in found["variants"]] == ["no_difference", "no_difference"]
    assert found["variants"][0]["reason"].startswith("By the mean over all steps it is −20.")
    assert found["variants"][1]["reason"] is None


def test_a_baseline_that_fails_ends_the_sweep(tmp_path: Path) -> None:
    taker, second = FakeTaker({}), FakeTaker({})
    taker.after = lambda job, answer: {"reason": "no data", "seconds": 1.0}
    found = sweep(tmp_path, plan(WARMUP, steps=0), taker)
    assert found["status"] == "failed"
    assert found["reason"] == "The baseline cannot be measured: no data"

    def second_fails(job: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        first = sum(not one["changes"] for one in second.jobs) == 1
        return answer if job["changes"] or first else {"reason": "no", "seconds": 1.0}

    second.after = second_fails
    (tmp_path / "two").mkdir()
    found = sweep(tmp_path / "two", plan(WARMUP, baselines=2), second)
    assert (found["status"], found["reason"]) == ("failed", "The baseline cannot be measured: no")


def test_winners_are_combined_and_confirmed_with_fresh_seeds(tmp_path: Path) -> None:
    taker = FakeTaker({"channels_last": 0.2, "kernel_warmup": 0.1, "set_to_none": 0.0})
    found = sweep(tmp_path, plan(WARMUP, LAST, ZERO), taker)
    best = found["best"]
    assert best["variants"] == ["channels_last", "kernel_warmup"]
    assert best["changes"] == {"channels_last": True, "kernel_warmup": True}
    assert best["verdict"] == "faster"
    assert best["low"] < 0.32 < best["high"]
    assert [one["kept"] for one in found["combining"]] == [True, True]
    assert best["rounds"] == 12  # all of them: an early end would favor a lucky estimate
    seeds = [{job["seed"] for job in taker.jobs if len(job["changes"]) == n} for n in (0, 1, 2)]
    assert seeds[2] - seeds[0]
    phases = [one["phase"] for one in found["rounds"]]
    assert phases == sorted(phases, key=["measuring", "combining", "confirming"].index)
    rules = confirming_rules(plan(), [], "confirm")
    assert (rules.decision_rounds, rules.level(1)) == ((12,), pytest.approx(0.05))


@pytest.mark.parametrize(
    ("loss", "text"),
    [({"loss": 0.9}, "loss higher by"), (NO_LOSS["metrics"], "loss is NaN or infinite in 5 of 5")],
)
def test_a_winner_with_a_worse_loss(tmp_path: Path, loss: dict[str, Any], text: str) -> None:
    answers = {"channels_last": {"metrics": loss}}
    effects = {"channels_last": 0.2, "kernel_warmup": 0.1}
    found = measured(tmp_path, effects, WARMUP, LAST, answers=answers)
    assert found["variants"][1]["verdict"] == "faster"
    assert found["variants"][1]["loss"]["verdict"] == "worse"
    assert found["variants"][1]["loss"]["text"].startswith(text)
    assert found["best"]["variants"] == ["kernel_warmup"]
    assert "loss" in found["combining"][0]["reason"]


def confirming(a_plan: WorkloadPlan, job: Mapping[str, Any]) -> bool:
    first = seed_of(a_plan, NextTrial("confirm", 0, ""))
    return first < job["seed"] <= first + a_plan.max_rounds


def test_a_combination_with_a_worse_confirmed_loss(tmp_path: Path) -> None:
    a_plan = plan(WARMUP, LAST)

    def broken_together(job: Mapping[str, Any]) -> dict[str, Any]:
        """Lose the loss of two changes in the confirmation, but not in the search."""
        return dict(NO_LOSS) if len(job["changes"]) == 2 and confirming(a_plan, job) else {}

    effects = {"channels_last": 0.2, "kernel_warmup": 0.1}
    answers = {"kernel_warmup": broken_together}
    found = measured(tmp_path, effects, WARMUP, LAST, answers=answers)
    assert found["status"] == "finished"
    assert (found["best"]["variants"], found["best"]["verdict"]) == (["channels_last"], "faster")
    assert found["best"]["loss"]["verdict"] == "same"
    assert found["best"]["metrics"]["samples_per_sec"] == pytest.approx(1200, rel=0.01)
    assert [one["kept"] for one in found["combining"]] == [True, False]
    assert "loss is NaN or infinite in" in found["combining"][1]["reason"]
    assert found["rounds"][-1]["phase"] == "confirming"
    text = "\n".join(closing(found))
    assert "Not in it: kernel_warmup: confirmed against the baseline, loss" in text


def test_the_reports_name_a_search_without_a_result(tmp_path: Path) -> None:
    taker, a_plan = FakeTaker({"kernel_warmup": 0.1}), plan(WARMUP)
    taker.answers["kernel_warmup"] = lambda job: dict(NO_LOSS) if confirming(a_plan, job) else {}
    taker.stop_after = 14  # two of the confirmation's rounds
    stopped = sweep(tmp_path, a_plan, taker)
    taker.stop_after, taker.stopping = math.inf, False
    assert "loss is NaN or infinite in 2 of 2 rounds." in "\n".join(closing(stopped))
    found = sweep(tmp_path, a_plan, taker)
    assert found["best"] is None
    text = "\n".join(closing(found))
    assert "none: the loss of each combination that was faster is worse." in text


def test_a_loss_below_0_is_compared_by_difference(tmp_path: Path) -> None:
    answers = {"kernel_warmup": {"metrics": {"loss": -0.5}}}
    found = measured(tmp_path, {"kernel_warmup": 0.1}, WARMUP, answers=answers)
    loss = found["variants"][0]["loss"]
    assert (loss["verdict"], loss["effect"]) == ("better", pytest.approx(-2, rel=0.05))


def test_a_loss_that_is_not_shown_equal_is_marked_and_excludes_no_variant(tmp_path: Path) -> None:
    noise = random.Random(3)
    answers = {"kernel_warmup": lambda job: {"metrics": {"loss": 0.5 * (1 + noise.gauss(0, 0.1))}}}
    found = measured(tmp_path, {"kernel_warmup": 0.1}, WARMUP, answers=answers)
    assert found["variants"][0]["loss"]["verdict"] == "not_shown_equal"
    assert found["variants"][0]["loss"]["low"] < -0.03
    assert found["best"]["variants"] == ["kernel_warmup"]
    for text in ("\n".join(table(found)), "\n".join(closing(found))):
        assert "loss not shown equal: " in text
    assert to_csv(found).splitlines()[2].endswith(",not_shown_equal")


def test_winners_that_exclude_each_other_are_not_combined(tmp_path: Path) -> None:
    effects = {"num_workers": 0.1, "prefetch_factor": 0.1}
    found = measured(
        tmp_path, effects, variant(num_workers=2, prefetch_factor=4), variant(num_workers=4)
    )
    assert found["best"]["variants"] == ["num_workers=2+prefetch_factor=4"]
    assert found["combining"][1] == {
        "tried": ["num_workers=2+prefetch_factor=4", "num_workers=4"],
        "kept": False,
        "reason": "num_workers is 2 in the combination already",
    }


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
    assert [one["order"] for one in found["rounds"]] == [one["order"] for one in expected["rounds"]]
    assert found["progress"]["done"] == expected["progress"]["done"]
    sessions: dict[tuple[str, int], set[int]] = {}
    for one in read_samples(tmp_path / "parts"):
        sessions.setdefault((one.contest, one.round), set()).add(one.session)
    assert len(sessions) >= 5
    assert all(len(of_round) == 1 for of_round in sessions.values())


def test_failures_before_a_resume_do_not_count(tmp_path: Path) -> None:
    a_plan = plan(WARMUP, max_rounds=5, find_best=False)
    taker = FakeTaker({"kernel_warmup": 0.1})
    no_memory = {"reason": "CUDA is out of memory.", "seconds": 1.0}
    taker.after = lambda job, answer: (
        answer if len(taker.jobs) <= 6 or job["changes"] else no_memory
    )
    failed = sweep(tmp_path, a_plan, taker)
    assert failed["status"] == "failed"
    assert failed["variants"][0]["rounds"] >= 3
    again = FakeTaker({"kernel_warmup": 0.1})
    found = sweep(tmp_path, a_plan, again)
    assert (found["status"], verdicts(found)) == ("finished", {"kernel_warmup": "faster"})
    assert len(again.jobs) == 4


def test_a_full_disk_stops_the_sweep(tmp_path: Path) -> None:
    full = {"reason": "No space left.", "stops": True, "metrics": {}}
    found = measured(tmp_path, {}, WARMUP, answers={"kernel_warmup": full}, max_rounds=2)
    assert found["status"] == "stopped"
    assert found["reason"] == "No space left. Resume continues from here once that is fixed."
    assert found["variants"][0]["verdict"] == "undecided"
    assert measured(tmp_path, {}, WARMUP, max_rounds=2)["status"] == "finished"


@pytest.mark.parametrize("key", ["host", "gpu", "torch"])
def test_a_sweep_continues_only_on_its_machine(tmp_path: Path, key: str) -> None:
    def answer(value: str) -> FakeTaker:
        taker = FakeTaker({})
        taker.after = lambda job, answer: answer | {"machine": {key: value}}
        return taker

    a_plan, first, other = plan(WARMUP, max_rounds=5), answer("a"), answer("b")
    first.stop_after = 3
    sweep(tmp_path, a_plan, first)
    refused = sweep(tmp_path, a_plan, other)
    assert refused["status"] == "stopped"
    assert refused["reason"].startswith(f"{key}: this sweep was measured with 'a', got 'b'.")
    assert len(other.jobs) == 1
    assert sweep(tmp_path, a_plan, answer("a"))["status"] == "finished"


def test_half_a_line_left_by_a_kill_is_repeated_with_its_round(tmp_path: Path) -> None:
    a_plan, again = plan(LAST, max_rounds=2), FakeTaker({})
    sweep(tmp_path, a_plan, FakeTaker({}))
    path = tmp_path / SAMPLES
    path.write_bytes(path.read_bytes()[:-20])
    half = path.read_bytes()
    assert len(read_samples(tmp_path)) == 3
    assert path.read_bytes() == half  # the process of a running sweep may be writing the line
    found = sweep(tmp_path, a_plan, again)
    assert len(again.jobs) == 2
    assert found["status"] == "finished"
    assert len(read_samples(tmp_path)) == 4


def test_rounds_after_a_repeated_one_are_repeated_too(tmp_path: Path) -> None:
    effects = {"channels_last": 0.3, "set_to_none": 0.02}
    a_plan = plan(LAST, ZERO, find_best=False, max_rounds=8)
    sweep(tmp_path, a_plan, FakeTaker(effects, noise=0.012))
    lines = (tmp_path / SAMPLES).read_text().splitlines(keepends=True)
    # As if the rules of that time had ended the variant after five rounds, and not the other.
    kept = [
        line
        for line in lines
        if (one := json.loads(line))["round"] <= 5 or one["name"] != "set_to_none=false"
    ]
    assert len(kept) < len(lines)
    (tmp_path / SAMPLES).write_text("".join(kept))
    sweep(tmp_path, a_plan, FakeTaker(effects, noise=0.012))
    taken = [one for one in read_samples(tmp_path) if one.name != "channels_last"]
    # None of a round of another session: the rest of it could not be compared.
    assert [one.session for one in taken] == [0] * 2 * 5 + [1] * 2 * 3
    assert {one.name for one in taken if one.round == 8} == {"baseline", "set_to_none=false"}


RATES = {"samples_per_sec": 1.0, "step_time": 0.1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"metrics": {}},
        {"metrics": RATES | {"samples_per_sec": 0}},
        {"metrics": RATES | {"mfu": "much"}},
        {"metrics": []},
        {"seconds": None},
        {"round": "1"},
        {"reason": 5},
    ],
)
def test_a_line_with_wrong_values_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    good = {"contest": "variants", "round": 1, "name": "baseline", "seconds": 1.0, "metrics": RATES}
    (tmp_path / SAMPLES).write_text(f"{json.dumps(good)}\n")
    assert read_samples(tmp_path)[0].metrics == RATES
    (tmp_path / SAMPLES).write_text(f"{json.dumps(good)}\n{json.dumps({**good, **wrong})}\n")
    with pytest.raises(SweepError, match="line 2 is no trial"):
        read_samples(tmp_path)


def test_a_sweep_of_a_killed_process_reads_as_stopped(tmp_path: Path) -> None:
    here = measured(tmp_path, {}, LAST, max_rounds=1) | {"status": "running"}
    gone = here | {"pid_started": 1.0, "pid_ticks": 1}
    elsewhere = gone | {"host": "another"}
    for content, status in (
        (here, "running"),
        (gone, "stopped"),
        (elsewhere, "running"),
        (elsewhere | {"updated": 1.0}, "stopped"),
    ):
        (tmp_path / SWEEP_JSON).write_text(json.dumps(content))
        assert read_sweep(tmp_path)["status"] == status


# --- steps, progress, drift -----------------------------------------------------------------------


def test_steps_are_chosen_from_a_first_trial(tmp_path: Path) -> None:
    taker = FakeTaker({}, noise=0)
    a_plan = plan(LAST, steps=0, warmup=0, sample_s=12.8, max_rounds=1)
    found = sweep(tmp_path, a_plan, taker)
    assert (taker.jobs[0]["steps"], taker.jobs[0]["seconds"]) == (0, 12.8)
    # 12.8 s of 128 ms
    assert (taker.jobs[1]["steps"], taker.jobs[1]["warmup"]) == (100, 25)
    assert (found["plan"]["steps"], found["plan"]["warmup"]) == (100, 25)
    slow = with_steps(plan(steps=0, warmup=0, sample_s=0.1), read_samples(tmp_path)[0])
    assert (slow.steps, slow.warmup) == (30, 10)
    (first, *_) = read_samples(tmp_path)
    whole = structs.replace(first, metrics=first.metrics | {"script_steps": 80})
    short = with_steps(plan(steps=0, warmup=0, sample_s=12.8), whole)
    assert short.steps + short.warmup < 80


def test_progress_never_promises_more_time_than_is_left(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    a_plan, taker = plan(LAST, WARMUP), FakeTaker({"channels_last": 0.2})
    write_plan(tmp_path, a_plan)
    SweepRunner(tmp_path, a_plan, taker, seen.append).run()
    totals = [one["progress"]["total"] for one in seen if one["progress"]["phase"] == "measuring"]
    assert totals == sorted(totals, reverse=True)
    assert seen[0]["progress"]["doing"].startswith("round 1 of 12: ")
    assert seen[0]["progress"]["seconds_left"] is None
    assert seen[1]["progress"]["seconds_left"] == 5.0 * (totals[1] - 1)
    last = seen[-1]["progress"]
    assert (last["done"], last["total"], last["seconds_left"]) == (len(taker.jobs),) * 2 + (0.0,)


def test_drift_of_the_machine_is_reported_and_changes_no_verdict(tmp_path: Path) -> None:
    taker = FakeTaker({"kernel_warmup": 0.05}, noise=0.002)

    def slower_and_slower(job: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        answer["metrics"]["samples_per_sec"] *= math.exp(-0.002 * len(taker.jobs))
        return answer

    taker.after = slower_and_slower
    found = sweep(tmp_path, plan(WARMUP, ZERO, find_best=False), taker)
    assert verdicts(found) == {"kernel_warmup": "faster", "set_to_none=false": "no_difference"}
    assert found["drift"]["p"] < 0.05
    assert "got slower" in found["drift"]["text"]


# --- comparisons ----------------------------------------------------------------------------------


def test_a_decided_variant_keeps_its_share_and_its_variance() -> None:
    noise = random.Random(5)
    samples = []
    for number in range(1, 9):
        for name in ("baseline", "same", "open"):
            rate = 1000.0 * (1 + (0.03 + noise.gauss(0, 0.02)) * (name == "open"))
            metrics = {"samples_per_sec": rate, "loss": 1.0, "loss_finite": True}
            samples.append(Trial(contest="variants", round=number, name=name, metrics=metrics))
    rules = rules_of(plan())
    comparison = VariantComparison("variants", "baseline", ("same", "open"))
    state = replay_comparison(comparison, samples, rules, seed=0)
    assert state.decided == {"same"}
    assert state.speed["same"].rounds == 5
    ratios = [math.log(one.metrics["samples_per_sec"] / 1000) for one in samples[2::3]]
    kept = estimate_effects({"same": [0.0] * 8, "open": ratios}, rules)["open"]
    found = state.speed["open"]
    assert (found.low, found.high) == (pytest.approx(kept.low), pytest.approx(kept.high))


@pytest.mark.parametrize("runs", [2, 3])
def test_a_variant_is_compared_with_the_geometric_mean_of_the_baselines(runs: int) -> None:
    rates = {"baseline": 500.0, "baseline 2": 2000.0, "baseline 3": 1000.0}
    others = {"loss": 1.0, "loss_finite": True}
    trials = [
        Trial(
            contest="variants", round=number, name=name, metrics={"samples_per_sec": rate, **others}
        )
        for number in (1, 2)
        for name, rate in [*list(rates.items())[:runs], ("variant", 1000.0)]
    ]
    comparison = VariantComparison("variants", "baseline", ("variant",), runs)
    state = replay_comparison(comparison, trials, rules_of(plan(max_rounds=2)), seed=0)
    assert state.next is None
    assert state.speed["variant"].effect == pytest.approx(0)


def test_many_variants_are_compared_with_several_trials_of_the_baseline(tmp_path: Path) -> None:
    variants = [LAST, WARMUP, variant(deterministic=True), ZERO]
    found = measured(tmp_path, {}, *variants, max_rounds=2, find_best=False)
    names = ["baseline", "baseline 2", *(one.name for one in variants)]
    assert [sorted(one["order"]) for one in found["rounds"]] == [sorted(names)] * 2
    assert [one["order"] for one in found["rounds"]] != [names] * 2
    trials = [one for one in read_samples(tmp_path) if one.name.startswith("baseline")]
    rates = sorted(one.metrics["samples_per_sec"] for one in trials)
    rate = found["baseline"]["metrics"]["samples_per_sec"]
    assert rate == pytest.approx(sum(rates[1:3]) / 2)


def test_the_number_of_baseline_trials_follows_the_supported_variants() -> None:
    variants = [LAST, WARMUP, variant(deterministic=True), ZERO]
    assert [plan(*variants[:count]).baselines for count in range(5)] == [1, 1, 1, 2, 2]
    assert plan(*variants[:2], variant(pin_memory=True)).baselines == 1  # unsupported on a CPU
    # A variant that becomes unsupported on another machine does not change a started sweep.
    assert replace(plan(*variants), variants=()).baselines == 2


def test_plans_survive_json_and_reject_invalid_values() -> None:
    a_plan = plan(LAST, variant(pin_memory=True))
    assert WorkloadPlan.from_dict(json.loads(json.dumps(a_plan.to_dict()))) == a_plan
    for wrong in (
        {"max_rounds": 0},
        {"steps": -1},
        {"alpha": 0.9},
        {"looks": ()},
        {"looks": (8, 5)},
        {"same": 0.001},
        {"looks": (math.inf,)},
        {"max_rounds": 5.5},
        {"seed": 1.5},
        {"find_best": "no"},
        {"baselines": -1},
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
    for name in (SAMPLES, SWEEP_JSON):
        assert "NaN" not in (tmp_path / name).read_text()


def test_reports_escape_the_texts_of_a_foreign_folder(tmp_path: Path) -> None:
    script = "alert(1)\x1b[2J"
    answers = {"kernel_warmup": {"reason": script, "metrics": {}}}
    evil = replace(WARMUP, name='=cmd()"<b>')
    found = measured(
        tmp_path, {"channels_last": 0.1}, evil, LAST, variant(pin_memory=True), answers=answers
    )
    lines = to_csv(found).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("name,label,verdict,effect,low,high,resolution,rounds,reason,")
    assert not any(line.startswith(("=", '"=')) for line in lines)
    assert lines[2].startswith("channels_last,channels_last on,faster,0.1")
    assert "\x1b" not in "".join([*table(found), *closing(found), progress_line(found)])


def test_the_documentation_names_every_part_of_sweep_json(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()
    found = measured(tmp_path, {"channels_last": 0.1}, LAST, max_rounds=5)
    parts = [found, found["plan"], found["progress"], found["variants"][0], found["rounds"][0]]
    parts += [found["variants"][0]["loss"], found["baseline"], found["baseline"]["metrics"]]
    missing = {key for part in parts for key in part if f"`{key}`" not in page}
    assert missing == set()
    assert set(found["best"]) - {"variants", "baseline"} <= set(found["variants"][0])
