"""Read the frames of a Python stack: phases of a training step, files of the user. No torch."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

INPUT = "input"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True)
class FrameRule:
    """Frames of torch by a part of their file, and by `functions` unless these are empty."""

    phase: str | None
    file: str
    functions: tuple[str, ...] = ()


FRAME_RULES = (
    FrameRule(None, "torch/distributed/elastic/"),  # Its frames enclose a whole training.
    FrameRule(COMMUNICATION, "torch/distributed/"),
    FrameRule(INPUT, "torch/utils/data/"),
    FrameRule(BACKWARD, "torch/autograd/", ("_engine_run_backward", "backward", "grad")),
    FrameRule(FORWARD, "torch/nn/modules/module.py", ("_call_impl",)),
    FrameRule(None, "torch/amp/grad_scaler.py", ("scale",)),
    FrameRule(OPTIMIZER, "torch/amp/grad_scaler.py"),
    FrameRule(OPTIMIZER, "torch/nn/utils/clip_grad.py"),
    FrameRule(OPTIMIZER, "torch/optim/"),
)
"""The first rule that matches a frame counts."""


def frame_phase(file: str, function: str) -> str | None:
    """Return the phase that one frame shows, or None."""
    for rule in FRAME_RULES:
        if rule.file in file and (not rule.functions or function in rule.functions):
            return rule.phase
    return None


def stack_phase(frames: Iterable[tuple[str, str]]) -> str | None:
    """Return the phase of a stack by its frames, the innermost first; None if unknown.

    A frame is its file and function. A forward pass within a backward pass is activation
    checkpointing, and part of the backward pass.
    """
    found = (frame_phase(file, function) for file, function in frames)
    phases = [phase for phase in found if phase is not None]
    if not phases:
        return None
    is_recomputed = phases[0] == FORWARD and BACKWARD in phases
    return BACKWARD if is_recomputed else phases[0]


def is_own_file(file: str) -> bool:
    """Return True for a file of the user: not of Python, of an installed package, or ours."""
    if file.startswith(("<", PACKAGE, *_LIBRARIES)):
        return False
    return not any(part in file for part in _INSTALLED)
