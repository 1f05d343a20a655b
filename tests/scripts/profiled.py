"""A training loop as in the tutorials, which goes on until it is stopped.

`--lightning` and `--huggingface` have it run by one of these; `--own` has a profiler of its own.
"""
# ruff: noqa: PLC0415

import sys
import tempfile
import time
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 1_000_000
torch.set_num_threads(1)


def loader():
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8)


def loop():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    own = torch.profiler.profile() if "--own" in sys.argv else nullcontext()
    with own:
        while True:
            for inputs, targets in loader():
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(0.002)


def lightning():
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch, _):
            time.sleep(0.002)
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(Model(), loader())


def huggingface():
    import transformers

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 1)

        def forward(self, inputs, labels):
            time.sleep(0.002)
            return {"loss": nn.functional.mse_loss(self.net(inputs), labels)}

    rows = [{"inputs": torch.randn(8), "labels": torch.randn(1)} for _ in range(64)]
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, save_strategy="no", report_to="none"
    )
    transformers.Trainer(Model(), arguments, train_dataset=rows).train()


def main():
    if "--lightning" in sys.argv:
        lightning()
    elif "--huggingface" in sys.argv:
        huggingface()
    else:
        loop()


if __name__ == "__main__":
    main()
