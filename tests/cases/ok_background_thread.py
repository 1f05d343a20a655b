# healthy, like contention: a thread of the same process takes the interpreter now and then
import threading
import time

import torch
from torch import nn

end = time.monotonic() + 4


def collect():
    while time.monotonic() < end:
        sum(number * number for number in range(2000))
        time.sleep(0.02)


threading.Thread(target=collect, daemon=True).start()
net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
while time.monotonic() < end:
    loss = net(torch.randn(128, 256)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
