"""Copies of GPU values without a GPU: done at once, with an event that a test lets arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepscope.store import cuda_readback


def replace_copies(monkeypatch: pytest.MonkeyPatch, new_event: Callable[[], Any]) -> None:
    """Replace the calls of CUDA; every row is sent to the host by itself."""

    def new_page(_device: object, cells: int) -> Any:
        memory = torch.empty(cells, dtype=torch.float64)
        return cuda_readback._Page(None, memory, memory.unbind())

    def copy_to_host(page: Any, count: int) -> Any:
        event = new_event()
        event.record()
        return page.memory[:count].numpy().copy(), event

    monkeypatch.setattr(cuda_readback, "_stream_key", lambda _device: (0, 0))
    monkeypatch.setattr(cuda_readback, "_new_page", new_page)
    monkeypatch.setattr(cuda_readback, "_copy_to_host", copy_to_host)
    monkeypatch.setattr(cuda_readback, "_is_capturing", lambda: False)
    monkeypatch.setattr(cuda_readback, "PERIOD_S", 0.0)
