# https://github.com/MILVLG/mcan-vqa/issues/26
# after the first validation the model stays in eval mode
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(300):
    loss = net(torch.randn(2048, 256)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 3:
        net.eval()
        with torch.no_grad():
            net(torch.randn(2048, 256))
