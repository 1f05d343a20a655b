"""A CUDA script that waits for the device where it wants to; prints how often it did."""
# ruff: noqa: T201

import json
import sys

import cudasim
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, ROWS, BATCH = 3, 64, 8


class Script:
    """Mixed precision with clipping, or two optimizers, from pinned memory."""

    def __init__(self, way):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
        self.judge = nn.Linear(1, 1).cuda() if way == "two optimizers" else None
        self.by_hand = way == "by hand"
        if not self.by_hand:
            self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        if self.judge is not None:
            self.other = torch.optim.SGD(self.judge.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(
            "cuda", init_scale=256.0, enabled=way == "mixed precision"
        )
        data = TensorDataset(torch.randn(ROWS, 16), torch.randn(ROWS, 1))
        self.loader = DataLoader(data, batch_size=BATCH, pin_memory=True)
        self.losses = []

    def step(self, x, y):
        if self.by_hand:
            loss = nn.functional.mse_loss(self.net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter -= 1e-3 * parameter.grad
                    parameter.grad = None
            return loss.detach()
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=self.scaler.is_enabled()):
            output = self.net(x)
            loss = nn.functional.mse_loss(output, y)
        self.scaler.scale(loss).backward()
        if self.judge is not None:
            self.other.zero_grad()
            self.judge(output.detach()).mean().backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        if self.judge is not None:
            self.other.step()
        self.scaler.update()
        return loss.detach()

    def epoch(self):
        for x, y in self.loader:
            self.losses.append(self.step(x.cuda(non_blocking=True), y.cuda(non_blocking=True)))
        return self.losses[-1].item()


def main(way):
    torch.set_num_threads(1)
    script = Script(way)
    script.epoch()  # first calls allocate
    torch.cuda.synchronize()
    with cudasim.counted() as calls:
        for _ in range(EPOCHS):
            script.epoch()
    names = {
        name: number for name, number in calls.items() if "ync" in name and "Async" not in name
    }
    print(json.dumps({"synchronizations": cudasim.synchronizations(calls), "calls": names}))
    print(json.dumps({"losses": [loss.item().hex() for loss in script.losses]}))


main(sys.argv[1])
