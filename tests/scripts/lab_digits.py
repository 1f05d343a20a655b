"""A training script with arguments; some of its options do what no trial may."""

import argparse
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def trouble(kind: str) -> None:
    if kind.startswith("leave"):
        subprocess.Popen(["sleep", kind.removeprefix("leave")], start_new_session=True)
        tempfile.mkdtemp()
    if kind == "write":
        Path("notes.txt").write_text(str(time.time()))
    elif kind == "error":
        raise RuntimeError("a layer is missing")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--pause", type=float, default=0.002, help="seconds a step waits")
    parser.add_argument("--trouble", default="")
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    trouble(options.trouble)
    signal.signal(signal.SIGINT, lambda *_: Path("interrupted.txt").write_text("by Ctrl-C"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pause = float(os.environ.get("PAUSE", options.pause))
    data = TensorDataset(torch.randn(2048, 16), torch.randint(0, 4, (2048,)))
    loader = DataLoader(data, batch_size=options.batch_size, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = 0
    try:
        while step < options.steps:
            for inputs, targets in loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(pause)
                step += 1
                if step >= options.steps:
                    break
            if options.out:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, Path(options.out, "last.pt"))
    finally:
        Path("finally.txt").write_text("a finally block ran")


if __name__ == "__main__":
    main()
