# healthy, like validation_each_step: a short validation at each 100th step, with gradients on
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(100_000, 256), torch.randn(100_000, 1))
held_out = DataLoader(TensorDataset(torch.randn(512, 256), torch.randn(512, 1)), batch_size=128)
end = time.monotonic() + 4
for step, (inputs, targets) in enumerate(DataLoader(data, batch_size=128)):
    loss = nn.functional.mse_loss(net(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        net.eval()
        total = sum(nn.functional.mse_loss(net(x), y).item() for x, y in held_out)
        net.train()
    if time.monotonic() > end:
        break
