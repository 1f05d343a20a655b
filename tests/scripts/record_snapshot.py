"""Records tests/data/recorded/snapshot.pickle: three steps of a small network on CUDA.

    python tests/scripts/record_snapshot.py FILE

Prints what torch itself counts at that moment. The paths in the file are made those of nobody.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 3


class Block(nn.Module):
    """Two layers around an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.relu(self.widen(x))
        return x + self.narrow(wide)


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train() -> list[Any]:
    """Train some steps, the second one labeled; return what must stay alive."""
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        torch.cuda.memory._set_memory_metadata("phase=second step" if step == 1 else "")
        inputs = torch.randn(128, 64, device="cuda")
        targets = torch.randint(0, 10, (128,), device="cuda")
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.memory._set_memory_metadata("")
    return [model, optimizer, inputs, targets]


def main() -> None:
    """Record, write, print."""
    torch.cuda.memory._record_memory_history(context="all", stacks="python", max_entries=100_000)
    alive = train()
    snapshot = torch.cuda.memory._snapshot()
    stats = torch.cuda.memory_stats()
    counted = {
        "allocated": torch.cuda.memory_allocated(),
        "requested": stats["requested_bytes.all.current"],
        "reserved": torch.cuda.memory_reserved(),
        "split": stats["inactive_split_bytes.all.current"],
    }
    sys.stdout.write(f"{json.dumps(counted)}\n")
    del alive
    frames = [
        frame
        for entry in [
            *(entry for trace in snapshot["device_traces"] for entry in trace),
            *(block for segment in snapshot["segments"] for block in segment["blocks"]),
        ]
        for frame in entry["frames"]
    ]
    for frame in frames:
        inside = frame["filename"].rpartition("/site-packages/")[2]
        if inside != frame["filename"]:
            frame["filename"] = f"/venv/site-packages/{inside}"
        elif frame["filename"].startswith("/"):
            frame["filename"] = f"/me/{Path(frame['filename']).name}"
    Path(sys.argv[1]).write_bytes(pickle.dumps(snapshot))


if __name__ == "__main__":
    main()
