# https://github.com/eriklindernoren/PyTorch-YOLOv3/issues/173: the weights are saved at each batch
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 512), nn.Linear(512, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(50_000, 64), torch.randn(50_000, 1))
end = time.monotonic() + 4.5
with tempfile.TemporaryDirectory() as folder:
    for inputs, targets in DataLoader(data, batch_size=16):
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        for number in range(2):
            torch.save(state, Path(folder, f"{number}.pt"))
        if time.monotonic() > end:
            break
