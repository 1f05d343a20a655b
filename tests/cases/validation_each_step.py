# https://discuss.pytorch.org/t/speed-up-cnn-pytorch/79268
# the whole validation set after each few steps
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(50_000, 64), torch.randn(50_000, 1))
held_out = DataLoader(TensorDataset(torch.randn(2000, 64), torch.randn(2000, 1)), batch_size=200)
end = time.monotonic() + 4
for step, (inputs, targets) in enumerate(DataLoader(data, batch_size=64)):
    loss = nn.functional.mse_loss(net(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        net.eval()
        with torch.no_grad():
            total = sum(nn.functional.mse_loss(net(x), y).item() for x, y in held_out)
        net.train()
    if time.monotonic() > end:
        break
