"""The callback with the Trainer of transformers, on a tiny GPT-2 in a child process, offline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.run import RunInfo, RunStatus, read_run, run_folders
from tests.support.child_process import ROOT, run_python
from tests.support.run_values import values

pytest.importorskip("transformers")
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
            raise ValueError("no data")
        if what == "stop" and state.global_step == 2:
            from stepscope import tracker
            from stepscope.store.reader import send_command
            recorder = tracker.current().session.recorder
            send_command(recorder.folder, "stop", {})
            while not recorder.commands.waiting:
                pass

if "joins" in what:
    mine = stepscope.init("mine")
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, num_train_epochs=2, logging_steps=2, max_grad_norm=1.0,
    eval_strategy="epoch", save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    gradient_accumulation_steps=2 if "accumulates" in what else 1, learning_rate=1e-3,
)
callback = StepscopeCallback("tiny gpt2", runs="runs")
# A batch of the validation counts as work.
worked, work = [], callback._run.work
callback._run.work = lambda: worked.append(work())
trainer = Trainer(
    model, arguments, train_dataset=Data(), eval_dataset=Data(), callbacks=[Ask(), callback]
)
trainer.train()
assert what == "stop" or len(worked) == 6
if "joins" in what:
    mine.log(val_after=1.0)
print("HISTORY", json.dumps(trainer.state.log_history), trainer.state.global_step)
"""


def train(folder: Path, what: str) -> tuple[RunInfo, list[dict[str, float]], str]:
    """Train in `folder`; return the one run, the Trainer's log and stderr."""
    (folder / "script.py").write_text(SCRIPT)
    variables = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    runs = str(folder / "runs")
    done = run_python("script.py", what, cwd=folder, STEPSCOPE_RUNS=runs, **variables)
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
    counts = [run.run_json[name] for name in ("total_steps", "epochs", "step")]
    assert counts == [12, 2, 12]
    assert run.run_json["config"]["learning_rate"] == 1e-3
    found = values(run)
    for name, key in {
        "loss": "train/loss",
        "learning_rate": "train/lr",
        "grad_norm": "train/grad_norm",
        "eval_loss": "val/loss",
        "train_loss": "summary/train_loss",
    }.items():
        assert found[key] == logged(history, name) != []
    epochs = dict(found["train/epochs_done"])
    assert len(epochs) == 12
    for step, epoch in logged(history, "epoch"):
        assert epochs[step] == pytest.approx(epoch, abs=1e-4)
    # Step 7 follows an evaluation of 1000 s by the script's clock, which is not its step time.
    assert [step for step, _ in found["perf/step_time"]] == list(range(2, 13))
    assert max(value for _, value in found["perf/step_time"]) < 1000


@pytest.mark.parametrize(
    ("what", "status", "reason", "steps"),
    [
        ("stop", RunStatus.STOPPED, None, 2),
        ("joins and accumulates", RunStatus.FINISHED, None, 6),
        ("fails", RunStatus.FAILED, "no data", None),
    ],
)
def test_steps_and_end_of_a_run(
    tmp_path: Path, what: str, status: RunStatus, reason: str | None, steps: int | None
) -> None:
    run, history, stderr = train(tmp_path, what)
    assert run.status is status
    assert (reason or "") in str(run.reason)
    if steps is None:
        assert "ValueError: no data" in stderr
        return
    assert run.run_json["step"] == steps
    found = values(run)
    assert [step for step, _ in found["train/epochs_done"]] == list(range(1, steps + 1))
    assert found["train/loss"] == logged(history, "loss")
    if "joins" in what:  # the script's own run is left open
        assert run.run_json["name"] == "mine"
        assert found["val/after"] == [(6, 1.0)]
