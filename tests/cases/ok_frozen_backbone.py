# healthy, like left_in_eval and detached_output: the frozen part is in eval mode, the head learns
import torch
from torch import nn

torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
head = nn.Linear(16, 2)
net = nn.Sequential(backbone, head)
backbone.requires_grad_(False)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
net.train()
backbone.eval()
for _ in range(60):
    inputs = torch.randn(16, 8)
    loss = nn.functional.cross_entropy(net(inputs), (inputs[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
