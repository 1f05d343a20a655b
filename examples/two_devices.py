"""Train a model on two GPUs and double the batch size until the first GPU runs out of memory.

    stepscope watch examples/two_devices.py

The first half of the network is on cuda:0, the second on cuda:1. The batch size doubles every
`STEPS` steps, so memory rises in steps until the run ends with an out-of-memory error.
"""

from __future__ import annotations

import torch
from torch import nn

STEPS = 40
FIRST_BATCH = 256
WIDTH = 64
CLASSES = 10


def half(inputs: int, outputs: int) -> nn.Sequential:
    """Return layers that keep many activations and compute little."""
    layers: list[nn.Module] = [nn.Linear(inputs, WIDTH)]
    for _ in range(8):
        layers += [nn.GELU(), nn.LayerNorm(WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


def main() -> None:
    """Train on made-up classes, in fp16 with a gradient scaler."""
    torch.manual_seed(0)
    first, second = half(32, WIDTH).to("cuda:0"), half(WIDTH, CLASSES).to("cuda:1")
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=STEPS, gamma=0.8)
    scaler = torch.amp.GradScaler("cuda")
    truth = torch.randn(32, CLASSES, device="cuda:0")
    batch = FIRST_BATCH
    while True:
        print(f"batch size {batch}", flush=True)
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            samples = torch.randn(batch, 32, device="cuda:0")
            target = (samples @ truth).argmax(dim=1).to("cuda:1")
            with torch.autocast("cuda", dtype=torch.float16):
                output = second(first(samples).to("cuda:1"))
                loss = nn.functional.cross_entropy(output, target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        batch *= 2


if __name__ == "__main__":
    main()
