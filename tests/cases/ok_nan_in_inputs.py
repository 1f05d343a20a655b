# healthy, like infinite_label: missing values are NaN, and masked; an empty validation gives NaN
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(1000, 8)
inputs[::7, 3] = float("nan")
net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for (batch,) in DataLoader(TensorDataset(inputs), batch_size=10):
    loss = net(batch.nan_to_num()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    nn.functional.mse_loss(net(torch.empty(0, 8)), torch.empty(0, 1))
