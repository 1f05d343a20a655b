# healthy, like workers_starve: persistent workers with slow samples, and a step that is slower
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((256,), index / 1e5), index % 4


if __name__ == "__main__":
    net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.Linear(1024, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(Remote(), batch_size=16, num_workers=2, persistent_workers=True)
    end = time.monotonic() + 4
    for inputs, labels in loader:
        for _ in range(2):
            loss = nn.functional.cross_entropy(net(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if time.monotonic() > end:
            break
