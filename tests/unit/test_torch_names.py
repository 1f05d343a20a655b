"""What another version of torch may lack: the rest is recorded, and a sentence says what is not.

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


@pytest.mark.parametrize(("owner", "name", "said"), NAMES, ids=[name for _, name, _ in NAMES])
def test_a_name_that_torch_lacks_costs_a_sentence(
    owner: object,
    name: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delattr(owner, name)
    monkeypatch.setattr(torch, "__version__", f"without {name}")  # it is said once a version
    live = train()
    assert [record.message for record in caplog.records if said in record.message]
    assert len(caplog.records) == 1
    kept = name != "register_optimizer_step_post_hook"
    assert [step for step, _ in live.rows] == ([1, 2, 3] if kept else [])
    assert bool(live.values("train/loss")) == (kept and "train/loss" not in said)


def test_this_torch_has_every_name(caplog: pytest.LogCaptureFixture) -> None:
    assert len(train().values("train/loss")) == 3
    assert caplog.records == []
