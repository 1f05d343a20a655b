"""Five trainings in the style of PyTorch's public examples, for `benchmarks.oom_sweep`.

    python benchmarks/oom_scripts.py NAME

`planted` is a sixth one that leaves free memory in pieces between two of its steps. Each prints the
peaks of allocated and of reserved memory after every step as its last line, in bytes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = Iterator[tuple[Tensor, Tensor]]


class MnistNet(nn.Module):
    """The network of examples/mnist."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.max_pool2d(x, 2).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.down(x))


class Block(nn.Module):
    """A block of nanoGPT, with attention written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) / (width // self.heads) ** 0.5
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """nanoGPT without its mask: tokens in, logits of each position out."""

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)))


class LanguageModel(nn.Module):
    """The LSTM of examples/word_language_model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(8000, 200)
        self.rnn = nn.LSTM(200, 200, 2)
        self.decoder = nn.Linear(200, 8000)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.rnn(self.encoder(x))[0])


def of_tokens(tokens: int, batch: int, lengths: Callable[[], int], steps: int) -> Batches:
    """Yield batches of tokens, each with the next one as its target."""
    for _ in range(steps):
        x = torch.randint(tokens, (batch, lengths()), device="cuda")
        yield x, x


def of_images(channels: int, size: int, batch: int, classes: int, steps: int) -> Batches:
    """Yield batches of images with their classes."""
    for _ in range(steps):
        images = torch.randn(batch, channels, size, size, device="cuda")
        yield images, torch.randint(classes, (batch,), device="cuda")


def varied() -> int:
    """Return the length of a batch's longest sample: most are short, some long."""
    return int(torch.distributions.LogNormal(4.4, 0.5).sample().clamp(16, 320))


def training(name: str) -> tuple[nn.Module, Batches, type[torch.optim.Optimizer]]:
    """Return the parts of one training."""
    if name == "mnist":
        return MnistNet(), of_images(1, 28, 768, 10, 6), torch.optim.Adadelta
    if name == "resnet":
        blocks = [Residual(32, 64, 2), Residual(64, 128, 2), Residual(128, 256, 2)]
        stem = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
        end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)]
        return nn.Sequential(*stem, *blocks, *end), of_images(3, 112, 64, 100, 6), torch.optim.SGD
    if name == "gpt":
        return Transformer(2000, 256, 4), of_tokens(2000, 8, lambda: 256, 6), torch.optim.AdamW
    if name == "lstm":
        return LanguageModel(), of_tokens(8000, 35, lambda: 128, 6), torch.optim.Adam
    if name == "lengths":
        return Transformer(2000, 128, 3), of_tokens(2000, 8, varied, 30), torch.optim.AdamW
    if name == PLANTED:
        layers = [layer for _ in range(5) for layer in (nn.Linear(512, 512), nn.ReLU())]
        batches = ((torch.randn(8192, 512, device="cuda"), torch.zeros(8192, device="cuda").long())
                   for _ in range(24))  # fmt: skip
        return nn.Sequential(*layers), batches, torch.optim.SGD
    raise SystemExit(f"NAME: must be one of {', '.join(NAMES)}, got {name!r}")


PLANTED = "planted"
NAMES = ("mnist", "resnet", "gpt", "lstm", "lengths", PLANTED)


def main(name: str) -> None:
    torch.manual_seed(0)
    model, batches, optimizer_class = training(name)
    model.cuda()
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    peaks, kept = [], []
    for step, (inputs, targets) in enumerate(batches):
        if name == PLANTED and step == 20:
            blocks = [torch.empty(9 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(60)]
            kept = blocks[::2]
            del blocks
        optimizer.zero_grad()
        outputs = model(inputs)
        F.cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        if name == PLANTED:
            time.sleep(0.06)  # steps of which the sampler sees each
    print(json.dumps(peaks))
    del kept


if __name__ == "__main__":
    main(sys.argv[1])
