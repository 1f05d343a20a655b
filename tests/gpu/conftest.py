"""These tests need CUDA: without it they skip with the reason, or fail under --require-gpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer.devices import cuda_reason

Need = Callable[[str | None], None]


@pytest.fixture
def need(request: pytest.FixtureRequest) -> Need:
    """Return a function that skips (or fails) the test for a reason; None lets it run."""
    required = request.config.getoption("--require-gpu", default=False)

    def check(reason: str | None) -> None:
        if reason is not None:
            (pytest.fail if required else pytest.skip)(reason)

    return check


@pytest.fixture(autouse=True)
def _cuda(need: Need) -> None:
    need(cuda_reason())
