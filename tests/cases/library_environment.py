# https://github.com/pytorch/rl/issues/1247
# a library's Python code around each step of the environment
import difflib
import time

import torch
from torch import nn

TEXT = [f"word{number * 7 % 13}" for number in range(190)]

net = nn.Linear(4, 2)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
end = time.monotonic() + 4.5
while time.monotonic() < end:
    ratio = difflib.SequenceMatcher(None, TEXT, TEXT[::-1]).ratio()
    loss = (net(torch.full((8, 4), ratio)) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
