# healthy, like steps that are all skipped: GradScaler skips the first, too large scales
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
for _ in range(150):
    loss = ((net(torch.randn(8, 8)) - 1) * 10).pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
