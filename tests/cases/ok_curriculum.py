# healthy, like graph_grows: sequences grow by design, and the time per sample does not
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
net = nn.GRU(8, 48, batch_first=True)
head = nn.Linear(48, 1)
optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=1e-3)
end = time.monotonic() + 5
data = TensorDataset(torch.randn(20_000, 80, 8))
started = time.monotonic()
for (inputs,) in DataLoader(data, batch_size=16):
    length = 10 + int(70 * min(1.0, (time.monotonic() - started) / 5))
    outputs, _ = net(inputs[:, :length])
    loss = head(outputs).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if time.monotonic() > end:
        break
