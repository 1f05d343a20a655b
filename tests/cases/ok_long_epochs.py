# healthy, like short_epochs: workers start again at each epoch, which takes a small part of it
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    net = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.Linear(1024, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(6000, 256), torch.randn(6000, 1))
    loader = DataLoader(data, batch_size=256, num_workers=1)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
