# https://github.com/hill-a/stable-baselines/issues/967
# each step of the environment waits for a server
import time

import torch
from torch import nn


def ask_server(action):
    time.sleep(0.005)
    return torch.randn(4)


policy = nn.Linear(4, 2)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
end = time.monotonic() + 4.5
while time.monotonic() < end:
    states = [torch.zeros(4)]
    for _ in range(8):
        with torch.no_grad():
            action = policy(states[-1]).argmax()
        states.append(ask_server(action))
    loss = policy(torch.stack(states)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
