"""The callback with Lightning, under both of its package names, in a child process."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from stepscope.run import RunInfo, RunStatus, read_run, run_folders
from tests.support.child_process import run_python
from tests.support.run_values import block_of, values

SCRIPT = """
import sys, time
clock, validating_s = time.time, [0.0]
time.time = lambda: clock() + validating_s[0]
import torch
package, what = sys.argv[1:]
if package == "lightning":
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger
else:
    import pytorch_lightning as pl
    from pytorch_lightning.loggers import CSVLogger
from stepscope.integrations.lightning import StepscopeCallback
assert issubclass(StepscopeCallback, pl.Callback)

class Model(pl.LightningModule):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)
    def training_step(self, batch, index):
        if what == "fails" and self.global_step == 3:
            raise ValueError("no data")
        loss = self.layer(batch[0]).pow(2).mean()
        if what != "silent":
            self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("margin", loss * 2)
        return loss
    def validation_step(self, batch, index):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("val_loss", loss)
        self.log("val_accuracy", loss / 2)
    def on_validation_end(self):
        validating_s[0] += 1000.0
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

class Ask(pl.Callback):
    def on_train_batch_end(self, trainer, *rest):
        if what == "stop" and trainer.global_step == 2:
            from stepscope import tracker
            from stepscope.store.reader import send_command
            recorder = tracker.current().session.recorder
            send_command(recorder.folder, "stop", {})
            while not recorder.commands.waiting:
                pass

callback = StepscopeCallback("tiny", runs="runs")
# A batch of the validation counts as work.
worked, work = [], callback._run.work
callback._run.work = lambda: worked.append(work())
torch.manual_seed(0)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 3)), batch_size=4)
trainer = pl.Trainer(
    max_epochs=2, accelerator="cpu", logger=CSVLogger("logs"), log_every_n_steps=1,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    accumulate_grad_batches=2 if what == "accumulates" else 1,
    callbacks=[Ask(), callback],
)
trainer.fit(Model(), data, data)
assert what == "stop" or len(worked) >= 2 * len(data)
print("STEPS", trainer.global_step)
"""


def train(folder: Path, what: str, package: str = "lightning", *, watched: bool = False) -> RunInfo:
    """Train in `folder` and return the one run."""
    pytest.importorskip(package)
    (folder / "script.py").write_text(SCRIPT)
    way = ["-m", "stepscope.watch"] if watched else []
    done = run_python(*way, "script.py", package, what, cwd=folder, CUDA_VISIBLE_DEVICES="")
    assert ("STEPS" in done.stdout) == (what != "fails"), done.stderr
    (run,) = run_folders(folder / "runs")
    return read_run(run)


def logged(folder: Path, name: str) -> list[float]:
    """Return the values of one column of Lightning's own CSV log, in order."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def numbers(found: dict[str, list[tuple[int, float]]], key: str) -> list[float]:
    return [value for _, value in found[key]]


def test_the_run_holds_what_lightning_logged(tmp_path: Path) -> None:
    run = train(tmp_path, "plain")
    assert (run.status, run.reason) == (RunStatus.FINISHED, None)
    counts = [run.run_json[name] for name in ("total_steps", "epochs", "step")]
    assert counts == [12, 2, 12]
    assert (run.run_json["epoch"], run.run_json["config"]) == (2, {"width": "3"})
    found = values(run)
    assert [step for step, _ in found["train/loss"]] == list(range(1, 13))
    for name, key in [
        ("train_loss_step", "train/loss"),
        ("train_loss_epoch", "train/loss_epoch"),
        ("margin", "train/margin"),
        ("val_loss", "val/loss"),
        ("val_accuracy", "eval/accuracy"),
    ]:
        assert numbers(found, key) == pytest.approx(logged(tmp_path, name), rel=1e-6), key
    assert [step for step, _ in found["val/loss"]] == [6, 12]
    assert numbers(found, "train/lr") == pytest.approx([0.1 * 0.5**n for n in range(12)])
    # A validation takes 1000 s by the script's clock: no step does.
    assert [step for step, _ in found["perf/step_time"]] == list(range(2, 13))
    assert max(numbers(found, "perf/step_time")) < 1000


def test_a_step_is_an_optimizer_step_under_accumulation(tmp_path: Path) -> None:
    """Of the package's former name."""
    found = values(train(tmp_path, "accumulates", "pytorch_lightning"))
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert numbers(found, "train/loss") == pytest.approx(logged(tmp_path, "train_loss_step"))


@pytest.mark.parametrize("watched", [False, True])
def test_a_silent_module_has_its_loss_and_no_empty_rows(tmp_path: Path, watched: bool) -> None:
    run = train(tmp_path, "silent", watched=watched)
    assert len(values(run)["train/loss"]) == 12
    assert (~np.isnan(block_of(run.folder).mean)).any(axis=0).all()


@pytest.mark.parametrize(
    ("what", "status", "reason", "step"),
    [
        ("stop", RunStatus.STOPPED, "", 2),
        ("fails", RunStatus.FAILED, "ValueError: no data", 3),
    ],
)
def test_stop_and_an_exception_end_the_run(
    tmp_path: Path, what: str, status: RunStatus, reason: str, step: int
) -> None:
    run = train(tmp_path, what)
    assert (run.status, run.run_json["step"]) == (status, step)
    assert reason in str(run.reason)
    if what == "fails":
        assert reason in (run.folder / "traceback.txt").read_text()
