"""Trains without an optimizer of torch in this process, in the way that its argument names."""
# ruff: noqa: T201

import sys
import time

import torch
from torch import multiprocessing, nn


def by_hand():
    w = nn.Parameter(torch.tensor(3.0))
    for _ in range(12):
        loss = (w - 1).square()
        loss.backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
            w.grad.zero_()
        print(loss.item().hex())


def work():
    w = nn.Parameter(torch.tensor(3.0))
    optimizer, until = torch.optim.SGD([w]), time.process_time() + 1.0
    while time.process_time() < until:
        w.square().backward()
        optimizer.step()


def children():
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
