"""The wrapper around the making of a DistributedDataParallel takes what the class itself takes."""

from __future__ import annotations

from typing import Any

from stepscope.watch.hooks.step_timing import StepPhaseTimer


def test_the_model_may_be_given_by_its_name() -> None:
    """As Lightning does."""
    made: list[Any] = []

    class Wrapper:
        def __init__(self, module: object) -> None:
            made.append(module)

    Wrapper.__init__ = StepPhaseTimer().around_making(Wrapper.__init__)  # type: ignore[method-assign]
    Wrapper(module="by name")
    Wrapper("by position")
    assert made == ["by name", "by position"]
