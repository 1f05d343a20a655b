"""Steps until it is stopped, and says how that came; `--ignore` leaves Ctrl-C without effect."""
# ruff: noqa: T201

import signal
import sys
import time

if "--ignore" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import torch

weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
try:
    while True:
        loss = ((weight - 1) ** 2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.002)
finally:
    print("cleaned up", flush=True)
