"""The hooks beside the real compiler and the real import of torch: seconds each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.child_process import child
from tests.support.fake_live import hooked

IMPORT = """
import os, sys
from stepscope.watch import hooks
from tests.support.fake_live import FakeLive
live = FakeLive()
finders = list(sys.meta_path)
hooks.install(live)
assert "torch" not in sys.modules, "torch must not be imported by us"
os.environ["OMP_NUM_THREADS"] = "1"  # counts only before the import
import importlib.util
import torch
assert torch.get_num_threads() == 1
assert type(torch.__spec__.loader).__name__ == "SourceFileLoader"
assert sys.meta_path == finders
assert "torch._dynamo" not in sys.modules, "a second of import time that nobody asked for"
w = torch.nn.Parameter(torch.ones(()))
optimizer = torch.optim.SGD([w], lr=0.1)
(w * 1).backward()
optimizer.step()
print(live.rows)
"""


def test_the_hooks_wait_for_the_scripts_own_import() -> None:
    assert child(IMPORT) == "[(1, {'train/loss': 1.0, 'train/lr': 0.1})]\n"


@pytest.mark.filterwarnings("ignore")  # the compiler provokes warnings of torch itself
@pytest.mark.parametrize("what", ["model", "step"])
def test_a_compiled_script_computes_the_same_and_is_seen(what: str) -> None:
    def run() -> list[float]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        forward = torch.compile(model, backend="aot_eager") if what == "model" else model

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = forward(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        run_step = torch.compile(step, backend="aot_eager") if what == "step" else step
        return [run_step(torch.randn(8, 4)).item() for _ in range(5)]

    bare, graphs = run(), dict(torch._dynamo.utils.counters["stats"])
    with hooked() as live:
        assert run() == bare
    assert live.values("train/loss") == bare
    assert dict(torch._dynamo.utils.counters["stats"]) == graphs
