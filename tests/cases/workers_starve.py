# https://github.com/open-edge-platform/geti/pull/5958: two workers do not keep up
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((32,), index / 1e5), index % 4


if __name__ == "__main__":
    net = nn.Linear(32, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(Remote(), batch_size=8, num_workers=2, persistent_workers=True)
    end = time.monotonic() + 4
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(net(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.monotonic() > end:
            break
