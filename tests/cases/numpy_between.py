# https://github.com/Kaiseem/SLAug/issues/2: numpy augments between batch and forward pass
import time

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def augment(images):
    found = []
    for image in images.numpy():
        padded = numpy.pad(image, 4, mode="reflect")
        found.append(numpy.rot90(padded)[4:20, 4:20].copy())
    return torch.from_numpy(numpy.stack(found))


net = nn.Sequential(nn.Flatten(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(100_000, 16, 16))
end = time.monotonic() + 4.5
while time.monotonic() < end:
    for (images,) in DataLoader(data, batch_size=64):
        inputs = augment(images)
        loss = net(inputs).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.monotonic() > end:
            break
