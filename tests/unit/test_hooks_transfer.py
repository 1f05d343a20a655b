"""Copies to the GPU, with events that a test lets pass; a real device is in tests/gpu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import get_ident
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from stepscope.watch.hooks import copies as copies_module
from tests.support.installed_hooks import torch_restored


@dataclass
class FakeEvent:
    """Fair because the code asks a CUDA event for nothing else; `now_ms` is the device's clock."""

    now_ms: float = 0.0
    passed: bool = False
    at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def query(self) -> bool:
        return FakeEvent.passed

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        assert FakeEvent.passed, "asked before the device was there: this would raise"
        return end.at_ms - self.at_ms


def fake_torch(tensor: type[Any], capturing: Callable[[], bool] = lambda: False) -> Any:
    cuda = SimpleNamespace(
        Event=lambda enable_timing: FakeEvent(),
        is_current_stream_capturing=capturing,
        current_device=lambda: 0,
    )
    return SimpleNamespace(
        cuda=cuda, compiler=torch.compiler, device=torch.device, Tensor=tensor, _C=torch._C
    )


class Copies:
    """Torch with a CUDA device that is none: `.to("cuda")` takes 2 ms of it."""

    def __init__(self, tensor: type[Any]) -> None:
        self.capturing = False
        self.thread = get_ident()
        FakeEvent.now_ms, FakeEvent.passed = 0.0, True
        fake = fake_torch(tensor, lambda: self.capturing)
        self.transfers = copies_module.attach_copies(fake, lambda: self.thread)


class _Tensor:
    """What is patched in these tests, instead of torch.Tensor."""

    is_cpu = True
    device = torch.device("cuda:0")

    def to(self, *args: Any, **kwargs: Any) -> str:
        FakeEvent.now_ms += 2.0
        return "copied"

    def cuda(self, device: Any = None) -> str:
        return self.to(device)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    monkeypatch.setattr(copies_module, "MIN_INTERVAL_S", 0.0)
    with torch_restored():
        yield Copies(_Tensor)


@pytest.mark.parametrize("arguments", [("cuda:0", torch.float16), (0,), (_Tensor(),)])
def test_a_copy_is_timed_however_its_target_is_named(
    copies: Copies, arguments: tuple[Any, ...]
) -> None:
    for copy in (_Tensor().to(*arguments), _Tensor().to(device=arguments[0]), _Tensor().cuda()):
        assert copy == "copied"
    assert copies.transfers.harvest() == pytest.approx(0.006)
    assert copies.transfers.harvest() == 0.0


@pytest.mark.parametrize("arguments", [("cpu",), (torch.float16,), ("cuda:1",)])
def test_what_does_not_go_to_the_current_device_is_not_timed(
    copies: Copies, arguments: tuple[Any, ...]
) -> None:
    _Tensor().to(*arguments)
    on_gpu = _Tensor()
    on_gpu.is_cpu = False
    on_gpu.to("cuda")
    copies.capturing = True  # a CUDA graph
    _Tensor().to("cuda")
    copies.capturing = False
    copies.thread = -1
    _Tensor().to("cuda")
    assert copies.transfers.harvest() == 0.0


def test_a_step_is_told_when_all_of_its_copies_have_ended(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Tensor().to("cuda")
    FakeEvent.passed = False
    _Tensor().to("cuda")
    for _ in range(3):
        assert copies.transfers.harvest() is None
        _Tensor().to("cuda")  # of a step that is not measured
    FakeEvent.passed = True
    monkeypatch.setattr(copies_module, "MIN_INTERVAL_S", 60.0)
    found = []
    for _ in range(3):
        found.append(copies.transfers.harvest())
        _Tensor().to("cuda")
    assert found == [pytest.approx(0.004), None, None], "of short steps only some are measured"


def test_more_copies_than_events_give_no_figure(copies: Copies) -> None:
    FakeEvent.passed = False
    for _ in range(copies_module.MAX_PAIRS + 1):
        assert _Tensor().to("cuda") == "copied"
    FakeEvent.passed = True
    assert copies.transfers.harvest() is None
    _Tensor().to("cuda")
    assert copies.transfers.harvest() == pytest.approx(0.002)


@pytest.fixture
def wrapped() -> Iterator[Copies]:
    """The methods of torch's tensors, wrapped as on a machine with CUDA."""
    with torch_restored():
        yield Copies(Tensor)
    assert not {"to", "cuda"} & vars(Tensor).keys()


def test_torchs_own_methods_stay_the_same_objects_and_can_be_compiled(wrapped: Copies) -> None:
    """A script may have them as keys of a table made before its first step."""
    convert = torch.compile(lambda x: x.to(torch.float64) + 1, backend="eager", fullgraph=True)
    assert convert(torch.ones(2)).dtype == torch.float64
    base: Any = torch._C.TensorBase
    for owner in (Tensor, torch.nn.Parameter):
        assert owner.to is base.to
        assert owner.cuda is base.cuda


class Image(Tensor):
    """A subclass with a table of its own; CUDA is pretended."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        if func is Tensor.to:
            FakeEvent.now_ms += 2.0
            args = (args[0], torch.float64)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_gets_torchs_own_function_and_counts_once(wrapped: Copies) -> None:
    image = torch.ones(2).as_subclass(Image)
    Image.seen.clear()
    moved = image.to("cuda")
    assert type(moved) is Image
    assert Image.seen == [torch._C.TensorBase.to]
    assert wrapped.transfers.harvest() == pytest.approx(0.002)
