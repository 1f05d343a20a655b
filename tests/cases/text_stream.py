# https://apxml.com/courses/advanced-pytorch/chapter-3-optimization-training-strategies/large-dataset-strategies
# lines of text are parsed in Python, by an iterable data set without workers
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

LINE = ",".join(f"{number / 7:.6f}" for number in range(200))


class Lines(IterableDataset):
    def __iter__(self):
        while True:
            values = [float(word.strip()) for word in LINE.split(",")]
            yield torch.tensor(values), torch.tensor(values[:1])


net = nn.Linear(200, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
end = time.monotonic() + 4
for inputs, targets in DataLoader(Lines(), batch_size=32):
    loss = nn.functional.mse_loss(net(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if time.monotonic() > end:
        break
