"""Activation checkpointing of a script that is not changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.applied_settings import applied


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(16, 48), nn.Dropout()

    def forward(self, x: Tensor, scale: Any = 1.0) -> Any:
        q, k, v = self.qkv(x).view(8, 4, 2, 24).transpose(1, 2).chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(out.transpose(1, 2).flatten(2)) * len([scale])


class Blocks(nn.Module):
    """Blocks in a list."""

    def __init__(self, kind: Callable[[], nn.Module] = Block, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def train(model: nn.Module, *, micro: int = 1, autocast: bool = False) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        for _ in range(micro):
            loss = model(torch.randn(8, 4, 16)).pow(2).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("words", "micro"), [("checkpoint", 1), ("checkpoint bf16", 2)])
def test_blocks_are_recomputed_and_losses_stay_equal(words: str, micro: int) -> None:
    with applied(words.removeprefix("checkpoint").strip()):
        bare = train(Blocks(), micro=micro)
    with applied(words) as found:
        assert train(Blocks(), micro=micro) == bare
        assert set(found.states().values()) == {"in effect"}, found.text("checkpoint")
        calls = 3 * (4 * micro - 1)
        text = f"{calls} recomputations in {calls} calls of 3 Block."
        assert found.text("checkpoint") == text


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, scale: Any = 1.0) -> Any:
        return super().forward(self.norm(x))


class Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.qkv.register_forward_hook(lambda *_: None)


class Inplace(Blocks):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + 0
            out = block(x)
            x += out  # the input of the block, which its backward does not need
        return x


class Doubled(nn.Module):
    """Its backward needs its weight only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(16)), nn.Identity()

    def forward(self, x: Tensor, cache: Any = None) -> Any:
        return x.detach().clone() * self.weight


class Cached(Blocks):
    def forward(self, x: Tensor) -> Any:
        cache: set[int] = set()
        for block in self.blocks:
            x = block(x, cache)
        return x


class Own(Blocks):
    gradient_checkpointing = True


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Blocks(Normed), "changes in place"),
        (lambda: Inplace(Doubled), "changes in place"),
        (lambda: Blocks(Hooked), "forward hooks"),
        (lambda: Cached(), "input of class set"),
        (lambda: Own(), "already uses"),
        (lambda: Blocks(count=2), "no ModuleList or Sequential with 3 blocks"),
    ],
)
def test_checkpointing_is_refused(make: Callable[[], nn.Module], reason: str) -> None:
    torch.manual_seed(0)
    bare = train(make())
    with applied("checkpoint") as found:
        torch.manual_seed(0)
        assert train(make()) == bare
        assert found.state("checkpoint") == "refused"
        assert reason in found.text("checkpoint")


def test_checkpointing_ends_when_batch_norm_is_no_longer_frozen() -> None:
    model = Blocks(Normed)
    for block in model.blocks:
        block.norm.eval()
    with applied("checkpoint") as found:
        train(model)
        assert found.state("checkpoint") == "in effect", found.text("checkpoint")
        model.train()
        train(model)
        assert found.state("checkpoint") == "refused"
        assert "changes in place" in found.text("checkpoint")


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call: plain(call, backend="eager"))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("eager_backend")
def test_checkpointing_is_refused_for_a_compiled_model() -> None:
    with applied("checkpoint compile") as found:
        train(Blocks())
        assert "is compiled" in found.text("checkpoint")
        assert found.state("compile") == "in effect"


class Recomputed(Blocks):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_bf16_stays_in_effect_for_a_script_that_checkpoints() -> None:
    with applied("bf16") as found:
        train(Recomputed())
        assert found.state("bf16") == "in effect", found.text("bf16")
