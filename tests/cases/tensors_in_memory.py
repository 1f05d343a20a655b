# https://github.com/gidariss/wDAE_GNN_FewShot/issues/17
# a small data set in memory, read by workers
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    data = TensorDataset(torch.randn(200_000, 8), torch.randn(200_000, 1))
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=32, num_workers=2, persistent_workers=True)
    end = time.monotonic() + 4
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.monotonic() > end:
            break
