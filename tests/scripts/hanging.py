"""Ranks that average their gradients, of which rank 1 hangs: hanging.py WHAT [BACKEND] [STEP].

WHAT: sleep (in the loop), stop (SIGSTOP), kill (SIGKILL), mismatch (another collective), receive (a
message that nobody sends), or none. One is no hang: validate (all ranks, with a collective a
batch). HANGING_S is how long it hangs, HANGING_END the number of steps, HANGING_TIMEOUT_S how long
a collective may take.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

WHAT, BACKEND, STEP = (*sys.argv[1:], *("none", "gloo", "40")[len(sys.argv) - 1 :])
RANK = int(os.environ["RANK"])
HANGS_S = float(os.environ.get("HANGING_S", "100"))
END = int(os.environ.get("HANGING_END", "2000"))


def here(what: str, step: int) -> bool:
    """Say whether this rank hangs now, in this way."""
    return (what, step, RANK) == (WHAT, int(STEP), 1)


def main() -> None:
    on_gpu = BACKEND == "nccl"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    seconds = float(os.environ.get("HANGING_TIMEOUT_S", "90"))
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=seconds))
    model = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(torch.randn(2001, 4, 4)):
        loss = model(batch.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        hang(step, device)
        for weights in model.parameters():
            dist.all_reduce(weights.grad, dist.ReduceOp.SUM)
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        time.sleep(0.02)
        if step == END:
            break


def hang(step: int, device: torch.device) -> None:
    x = torch.ones(100, device=device)
    if here("sleep", step):
        time.sleep(HANGS_S)
    if here("stop", step):
        os.kill(os.getpid(), signal.SIGSTOP)
    if here("kill", step):
        os.kill(os.getpid(), signal.SIGKILL)
    if here("mismatch", step):
        dist.all_gather([torch.empty_like(x) for _ in range(dist.get_world_size())], x)
    if WHAT == "receive" and step == int(STEP):
        dist.recv(x, 1 - RANK if RANK < 2 else 0)
    if WHAT == "validate" and step == int(STEP):
        for _ in range(int(HANGS_S / 0.1)):
            time.sleep(0.1 if RANK else 0.05)
            dist.all_reduce(x)


main()
