"""Trains without an optimizer of torch in this process, in the way that its argument names."""
# ruff: noqa: T201

import os
import sys
import time

import torch
from torch import multiprocessing, nn


def by_hand():
    w = nn.Parameter(torch.tensor(3.0))
    for _ in range(5):
        loss = (w - 1).square()
        loss.backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
            w.grad.zero_()
        print(loss.item().hex())


def forked():
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    w = nn.Parameter(torch.tensor(3.0))
    w.square().backward()


def functions():
    w = torch.tensor(3.0)
    for _ in range(5):
        w = w - 0.1 * torch.func.grad(lambda w: (w - 1).square())(w)
    print(w.item())


def never_stepped():
    w = nn.Parameter(torch.tensor(3.0))
    torch.optim.SGD([w])
    w.square().backward()


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
