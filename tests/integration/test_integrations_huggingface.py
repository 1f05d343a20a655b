"""The callback against the real Trainer of transformers: a tiny GPT-2 made from its configuration.

Each training runs in a process of its own: nothing is downloaded, and the library's warnings are
not ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.run import RunInfo, RunStatus, read_run, run_folders
from tests.support.run_values import values

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, sys, time
clock, evaluating_s = time.time, [0.0]
time.time = lambda: clock() + evaluating_s[0]
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
import stepscope
from stepscope.integrations.huggingface import StepscopeCallback

torch.manual_seed(0)
what = sys.argv[1]

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        tokens = torch.arange(8) + index % 8
        return {"input_ids": tokens, "labels": tokens}

class Ask(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        evaluating_s[0] += 1000.0
    def on_step_end(self, args, state, control, **kwargs):
        if what == "fails" and state.global_step == 3:
            raise ValueError("data ran out")
        if what == "stop" and state.global_step == 2:
            from stepscope import tracker
            from stepscope.store.reader import send_command
            recorder = tracker.current().session.recorder
            send_command(recorder.folder, "stop", {})
            while not recorder.command_waiting:
                pass

if what == "joins":
    mine = stepscope.init("mine")
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, num_train_epochs=2, logging_steps=2, max_grad_norm=1.0,
    eval_strategy="epoch", save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    gradient_accumulation_steps=2 if what == "accumulates" else 1, learning_rate=1e-3,
)
callback = StepscopeCallback("tiny gpt2", runs="runs")
# A batch of the validation says that no step is missing.
worked, work = [], callback._run.work
callback._run.work = lambda: worked.append(work())
trainer = Trainer(
    model, arguments, train_dataset=Data(), eval_dataset=Data(), callbacks=[Ask(), callback]
)
trainer.train()
assert what == "stop" or len(worked) == 6
if what == "joins":
    mine.log(val_after=1.0)
print("HISTORY", json.dumps(trainer.state.log_history), trainer.state.global_step)
"""


def train(
    folder: Path, what: str, *, watched: bool = False
) -> tuple[RunInfo, list[dict[str, float]], str]:
    """Train in `folder`; return the one run, the Trainer's log and stderr."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "STEPSCOPE_RUNS": str(folder / "runs"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, *(["-m", "stepscope.watch"] if watched else []), str(script), what],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=100,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("HISTORY")]
    assert lines or what == "fails", done.stderr
    history = json.loads(lines[0][8 : lines[0].rindex("]") + 1]) if lines else []
    (run,) = run_folders(folder / "runs")
    return read_run(run), history, done.stderr


def logged(history: list[dict[str, float]], name: str) -> list[tuple[int, float]]:
    return [(int(entry["step"]), entry[name]) for entry in history if name in entry]


def test_the_run_holds_what_the_trainer_logged(tmp_path: Path) -> None:
    run, history, _ = train(tmp_path, "plain")
    assert (run.status, run.reason) == (RunStatus.FINISHED, None)
    assert (run.run_json["kind"], run.run_json["name"]) == ("init", "tiny gpt2")
    assert (run.run_json["total_steps"], run.run_json["epochs"], run.run_json["step"]) == (
        12,
        2,
        12,
    )
    assert run.run_json["config"]["learning_rate"] == 1e-3
    found = values(run)
    for name, key in [
        ("loss", "train/loss"),
        ("learning_rate", "train/lr"),
        ("grad_norm", "train/grad_norm"),
        ("eval_loss", "val/loss"),
        ("train_loss", "summary/train_loss"),
    ]:
        assert logged(history, name), name
        assert found[key] == logged(history, name)
    epochs = dict(found["train/epochs_done"])
    assert len(epochs) == 12
    assert all(
        epochs[step] == pytest.approx(epoch, abs=1e-4) for step, epoch in logged(history, "epoch")
    )
    # Step 7 follows an evaluation of 1000 s by the script's clock, which is not its step time.
    assert [step for step, _ in found["perf/step_time"]] == list(range(2, 13))
    assert max(value for _, value in found["perf/step_time"]) < 1000


def test_a_step_is_an_optimizer_step_under_accumulation(tmp_path: Path) -> None:
    run, history, _ = train(tmp_path, "accumulates")
    assert [step for step, _ in values(run)["train/epochs_done"]] == [1, 2, 3, 4, 5, 6]
    assert values(run)["train/loss"] == logged(history, "loss")


def test_stop_ends_the_training_after_the_step_and_the_script_goes_on(tmp_path: Path) -> None:
    run, history, _ = train(tmp_path, "stop")
    assert (run.status, run.reason) == (RunStatus.STOPPED, "Stopped from the page.")
    assert run.run_json["step"] == 2
    assert values(run)["train/loss"] == logged(history, "loss")


def test_an_exception_fails_the_run(tmp_path: Path) -> None:
    run, _, stderr = train(tmp_path, "fails")
    assert run.status is RunStatus.FAILED
    assert "data ran out" in str(run.reason)
    assert "data ran out" in stderr


def test_a_run_of_the_script_is_joined_and_left_open(tmp_path: Path) -> None:
    run, history, _ = train(tmp_path, "joins")
    assert (run.status, run.run_json["name"]) == (RunStatus.FINISHED, "mine")
    assert values(run)["train/loss"] == logged(history, "loss")
    assert values(run)["val/after"] == [(12, 1.0)]


def test_a_watched_run_keeps_the_loss_of_every_step_to_itself(tmp_path: Path) -> None:
    run, history, _ = train(tmp_path, "plain", watched=True)
    assert (run.status, run.run_json["kind"]) == (RunStatus.FINISHED, "watch")
    found = values(run)
    assert [step for step, _ in found["train/loss"]] == list(range(1, 13))
    losses = [value for _, value in found["train/loss"]]
    means = [sum(losses[start : start + 2]) / 2 for start in range(0, 12, 2)]
    assert means == pytest.approx([value for _, value in logged(history, "loss")], rel=1e-5)
    assert found["val/loss"] == logged(history, "eval_loss")
