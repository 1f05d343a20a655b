"""Hugging Face's Trainer in fp16 with loader workers, and Lightning in 16-mixed without.

Forked workers of a second epoch start while values of the GPU are on their way to the recorder.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.run import RunStatus, read_run, run_folders
from tests.support.child_process import run_python
from tests.support.run_values import metric

STEPS = 12  # of each training: two epochs of 24 rows in batches of 4

HUGGINGFACE = """
import json, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        tokens = torch.arange(8) + index % 8
        return {"input_ids": tokens, "labels": tokens}

class Telling(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        losses.append(loss.detach())
        return loss

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
losses = []
arguments = TrainingArguments(
    "out", fp16=True, dataloader_num_workers=int(sys.argv[1]), per_device_train_batch_size=4,
    num_train_epochs=2, logging_steps=1, max_grad_norm=1.0, save_strategy="no", report_to=[],
    disable_tqdm=True,
)
Telling(model, arguments, train_dataset=Data()).train()
print("LOSSES", json.dumps([float(loss) for loss in losses]), flush=True)
"""
LIGHTNING = """
import json, sys
import lightning, torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Tiny(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.losses = []
    def training_step(self, batch, index):
        __import__('time').sleep(0.03)  # a sampler's tick is 0.1 s, and there are twelve steps
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.log("train_loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

lightning.seed_everything(0)
data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
model = Tiny()
scaler = torch.amp.GradScaler("cuda", 2.0**10)  # 2**16 overflows in some steps
trainer = lightning.Trainer(
    max_epochs=2, accelerator="gpu", devices=1, logger=False,
    plugins=[MixedPrecision("16-mixed", "cuda", scaler)], enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
)
workers = int(sys.argv[1])
trainer.fit(model, DataLoader(data, batch_size=4, num_workers=workers, pin_memory=True))
print("LOSSES", json.dumps([float(loss) for loss in model.losses]), flush=True)
"""
SCRIPTS = {"transformers": HUGGINGFACE, "lightning": LIGHTNING}


@pytest.mark.parametrize(("package", "workers"), [("transformers", 2), ("lightning", 0)])
def test_a_watched_framework_is_recorded_whole(package: str, workers: int, tmp_path: Path) -> None:
    pytest.importorskip(package)
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[package])
    words = ("-m", "stepscope.watch", str(script), str(workers))
    runs = str(tmp_path / "runs")
    done = run_python(*words, cwd=tmp_path, HF_HUB_OFFLINE="1", STEPSCOPE_RUNS=runs)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOSSES")]
    losses = json.loads(line.removeprefix("LOSSES"))
    (run,) = run_folders(tmp_path / "runs")
    assert read_run(run).status is RunStatus.FINISHED
    assert len(losses) == STEPS
    assert metric(run, "train/loss").tolist() == pytest.approx(losses, rel=1e-6)
    assert len(metric(run, "train/amp_scale")) == STEPS
    assert read_run(run).run_json["device"].startswith(("GPU-", "MIG-"))
    assert len(metric(run, "memory/allocated", "samples")) > 0
