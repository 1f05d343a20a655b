# https://github.com/visionml/pytracking/issues/374: workers end after each short epoch
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sequences(Dataset):
    opened = False

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if not self.opened:
            time.sleep(0.2)  # each worker opens the files again
            self.opened = True
        return torch.full((16,), index / 64), torch.tensor([index / 64])


if __name__ == "__main__":
    net = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(Sequences(), batch_size=8, num_workers=2)
    for _ in range(12):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
