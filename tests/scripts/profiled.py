"""A training loop as in the tutorials, which goes on until it is stopped; `--init` records it."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def main():
    rec = None
    if "--init" in sys.argv:
        import stepscope  # noqa: PLC0415

        rec = stepscope.init("profiled")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    while True:
        loader = DataLoader(data, batch_size=8)
        for inputs, targets in loader if rec is None else rec.batches(loader):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rec is not None:
                rec.step(loss=loss)
            time.sleep(0.002)


if __name__ == "__main__":
    main()
