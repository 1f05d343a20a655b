# https://github.com/wandb/wandb/issues/8666: logging blocks the loop every few steps
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Uploader:
    def __init__(self):
        self.waiting = []

    def log(self, values):
        self.waiting.append(values)
        if len(self.waiting) == 20:
            time.sleep(0.3)  # the network
            self.waiting.clear()


net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
uploader = Uploader()
data = TensorDataset(torch.randn(100_000, 64), torch.randn(100_000, 1))
end = time.monotonic() + 5
for inputs, targets in DataLoader(data, batch_size=64):
    loss = nn.functional.mse_loss(net(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    uploader.log({"loss": loss.item()})
    if time.monotonic() > end:
        break
