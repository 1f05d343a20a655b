"""A name that another version of torch lacks costs one warning; all else is recorded.

`tests/torch_versions.sh` runs this under other versions, such as the oldest and the newest.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo  # which takes some of the names at its import
from torch import nn
from torch._C._dynamo import eval_frame
from torch.optim import optimizer as torchs_optimizer

import stepscope
from stepscope.host.environment import SUPPORTED, warn_if_unsupported
from tests.support.fake_live import FakeLive, hooked

FRAMES = ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")
NAMES: list[tuple[object, str, str]] = [
    *(
        (eval_frame, name, "cannot keep its compiler off our code")
        for name in (("skip_code",) if hasattr(eval_frame, "skip_code") else FRAMES)
    ),
    (torch._C, "_disabled_torch_dispatch_impl", "train/loss will be missing"),
    (torch.nn.utils.clip_grad, "clip_grad_norm_", "train/grad_norm will be missing"),
    (torch.amp.GradScaler, "scale", "train/amp_scale and train/amp_skipped will be missing"),
    (torchs_optimizer, "register_optimizer_step_post_hook", "all training metrics"),
]


def train() -> FakeLive:
    with hooked() as live:
        w = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([w], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (w * 1).backward()
            optimizer.step()
    assert w.item() == pytest.approx(0.7)
    return live


@pytest.mark.parametrize(
    ("owner", "name", "missing"),
    [*NAMES, (None, "", "")],
)
def test_a_missing_name_costs_one_warning(
    owner: object,
    name: str,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if owner is not None:
        monkeypatch.delattr(owner, name)
        monkeypatch.setattr(torch, "__version__", f"without {name}")  # logged once per version
    live = train()
    assert [missing in record.message for record in caplog.records] == [True] * bool(name)
    kept = name != "register_optimizer_step_post_hook"
    assert [step for step, _ in live.rows] == ([1, 2, 3] if kept else [])
    assert bool(live.values("train/loss")) == (kept and "train/loss" not in missing)


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("2.5.1", False),
        ("2.6.0+cu124", True),
        ("2.16.0", False),
        ("a build of our own", True),
    ],
)
def test_a_version_outside_the_range_costs_one_warning_in_both_ways_of_recording(
    version: str,
    supported: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    warn_if_unsupported.cache_clear()
    live = train()
    assert [step for step, _ in live.rows] == [1, 2, 3], "trained and recorded all the same"
    assert [version in one.message for one in caplog.records] == [True] * (not supported)
    warn_if_unsupported.cache_clear()
    with stepscope.init(runs=tmp_path, sample=False) as tracker:
        for _ in range(3):
            tracker.step(loss=1.0)
    assert sum("is not supported" in one.message for one in caplog.records) == 2 * (not supported)


def test_the_range_in_the_documentation_is_that_of_the_code() -> None:
    root = Path(__file__).parents[2]
    for page in ("README.md", "docs/watch.md"):
        assert f"torch {SUPPORTED}" in (root / page).read_text(encoding="utf-8"), page
