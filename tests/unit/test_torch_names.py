"""A name that another version of torch lacks costs one warning; all else is recorded.

`tests/torch_versions.sh` runs this under the oldest and the newest version that is supported.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # which takes some of the names at its import
from torch import nn
from torch._C._dynamo import eval_frame
from torch.optim import optimizer as torchs_optimizer

from tests.support.fake_live import FakeLive, hooked

NAMES: list[tuple[object, str, str]] = [
    (eval_frame, "set_code_exec_strategy", "cannot keep its compiler off our code"),
    (eval_frame, "_FrameAction", "cannot keep its compiler off our code"),
    (eval_frame, "_FrameExecStrategy", "cannot keep its compiler off our code"),
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
    ids=[*(name for _, name, _ in NAMES), "none"],
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
