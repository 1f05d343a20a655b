"""A training loop as in the tutorials, which goes on until it is stopped.

`--lightning` has it run by Lightning.
"""
# ruff: noqa: PLC0415

import sys
import time

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


def main():
    if "--lightning" in sys.argv:
        lightning()
    else:
        loop()


if __name__ == "__main__":
    main()
