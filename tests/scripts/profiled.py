"""A training loop as in the tutorials, which goes on until it is stopped."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def loader():
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8)


def loop():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        for inputs, targets in loader():
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.002)


if __name__ == "__main__":
    loop()
