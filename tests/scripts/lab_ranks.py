"""A DDP script for trials of several ranks over gloo, of which rank 1 may do what ends a trial."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pause", type=float, default=0.002, help="seconds a step of rank 1 waits")
    parser.add_argument("--trouble", default="", help="what rank 1 does at step 10")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    for number in () if options.trouble else (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: Path(f"signal-{rank}.txt").write_text("a handler ran"))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    if options.trouble != "alone":
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    data = TensorDataset(torch.randn(2048, 16), torch.randint(0, 4, (2048,)))
    sampler = DistributedSampler(data, num_replicas=int(os.environ["WORLD_SIZE"]), rank=rank)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = 0
    while True:
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 1:
                time.sleep(options.pause)
            if rank == 1 and step == 10:
                if options.trouble == "error":
                    raise RuntimeError("a layer is missing")
                if options.trouble == "exit":
                    sys.stderr.write("no more memory for this rank\n")
                    os._exit(7)


if __name__ == "__main__":
    main()
