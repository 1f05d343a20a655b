# https://github.com/Pointcept/Pointcept/issues/454: more busy processes than cores
import os
import subprocess
import sys
import time

import torch
from torch import nn

BUSY = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 * os.cpu_count())]
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
end = time.monotonic() + 6
while time.monotonic() < end:
    loss = net(torch.randn(64, 256)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
for other in others:
    other.kill()
    other.wait()
