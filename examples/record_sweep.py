"""Records the sweep that an empty lab page offers, by the lab itself; nothing else should run.

    python -m examples.record_sweep

What names the machine (host, user, process, paths) is then replaced. No measured value is changed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.record import HERE, NEUTRAL, neutral
from stepscope.lab.folder import LAB, PLAN_JSON, SWEEP_JSON, read_sweep

NAME = "cpu-sweep"
VARIANTS = (
    "precision=bf16,optimizer_impl=fused,optimizer_impl=foreach,num_workers=2,deterministic,"
    "max_grad_norm=1.0,pin_memory"
)
LARGEST = 200_000
"""Bytes of sweep.json."""


def main() -> None:
    """Measure, and put the result in place of the old one."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, LAB, NAME)
        command = ["--workload", "digits_mlp", "--variants", VARIANTS, "--folder", str(folder)]
        folder.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "trainer.lab", *command], check=True, cwd=HERE.parent)
        assert read_sweep(folder)["status"] == "finished"
        target = HERE / LAB / NAME
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in (PLAN_JSON, SWEEP_JSON):
            content = json.loads(neutral((folder / name).read_text(), work))
            if name == SWEEP_JSON:
                content |= NEUTRAL
            (target / name).write_text(json.dumps(content, indent=1))
    size = (target / SWEEP_JSON).stat().st_size
    if size > LARGEST:
        raise ValueError(f"{SWEEP_JSON}: must be under {LARGEST} bytes, got {size}.")


if __name__ == "__main__":
    main()
