"""Is a predicted peak the true one? 20 configurations, each predicted and then really trained.

    python -m benchmarks.fit_accuracy [--device cpu|cuda] [--only NAME]

The prediction is what `python -m trainer.memory_estimate --json` prints. The truth is a run of the
same settings in a process of its own: three steps, then the validation. On a CPU it is the
highest sum of what torch's allocator reports to the profiler, without the data set; on CUDA it is
`max_memory_allocated`.
Targets: all within -6 … +6 % on a CPU, within ±8 % on the simulator's CUDA allocator. On a GPU this
has not been measured yet.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import at_most, report, say, wait_for_quiet
from trainer.config import RunConfig, Workload, defaults

STEPS = 3
LIMITS = {"cpu": 0.06, "cuda": 0.08}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"workload": "linear", "batch_size": 512},
    "digits_mlp": {"workload": "digits_mlp"},
    "digits_mlp 4096": {"workload": "digits_mlp", "batch_size": 4096, "max_grad_norm": 1.0},
    "digits_cnn": {"workload": "digits_cnn"},
    "digits_cnn 1024 bf16": {"workload": "digits_cnn", "batch_size": 1024, "precision": "bf16"},
    "digits_cnn SGD nchw": {
        "workload": "digits_cnn",
        "batch_size": 512,
        "optimizer": "sgd",
        "channels_last": False,
    },
    "gpt": {"workload": "gpt"},
    "gpt 64 foreach": {"workload": "gpt", "batch_size": 64, "optimizer_impl": "foreach"},
    "gpt wide": {"workload": "gpt", "width": 256, "num_layers": 4, "batch_size": 8},
    "gpt bf16": {"workload": "gpt", "width": 128, "num_layers": 4, "precision": "bf16"},
    "gpt checkpointing": {
        "workload": "gpt",
        "width": 128,
        "num_layers": 6,
        "batch_size": 32,
        "activation_checkpointing": True,
    },
    "gpt accumulation": {
        "workload": "gpt",
        "width": 128,
        "gradient_accumulation_steps": 4,
        "batch_size": 8,
        "max_grad_norm": 1.0,
    },
    "gpt plain loop": {
        "workload": "gpt",
        "width": 256,
        "optimizer_impl": "for-loop",
        "set_to_none": False,
    },
    "gpt pure bf16": {"workload": "gpt", "width": 128, "num_layers": 4, "precision": "pure_bf16"},
    "resnet": {"workload": "resnet", "batch_size": 4},
    "resnet bf16": {"workload": "resnet", "batch_size": 4, "width": 32, "precision": "bf16"},
    "resnet checkpointing": {
        "workload": "resnet",
        "batch_size": 8,
        "width": 32,
        "activation_checkpointing": True,
    },
    "resnet nchw": {
        "workload": "resnet",
        "batch_size": 4,
        "width": 32,
        "image_size": 128,
        "channels_last": False,
    },
    "matmul": {"workload": "matmul", "width": 256},
    "fill": {
        "workload": "memory_stress",
        "batch_size": 8,
        "width": 16,
        "gradient_accumulation_steps": 2,
    },
}

ON_CUDA = {
    "gpt pure bf16": {"workload": "digits_mlp", "batch_size": 2048, "precision": "pure_bf16"},
    "resnet": {"workload": "resnet", "batch_size": 2, "precision": "pure_bf16"},
    "fill": {
        "workload": "memory_stress",
        "batch_size": 8,
        "width": 16,
        "dataset_on_device": True,
        "copy_stream": False,
    },
    "matmul": {"workload": "matmul", "width": 256, "cuda_graphs": True, "precision": "fp16"},
}
"""What takes the place of a case on CUDA: what only CUDA has, and what the simulator can do."""


def configured(case: dict[str, Any], device: str) -> RunConfig:
    """Return the configuration of a case; a run of three steps."""
    base = defaults(Workload(case["workload"]), device).to_dict()
    return RunConfig.from_dict({**base, **case, "max_steps": STEPS, "epochs": 1})


def predicted(config: RunConfig) -> dict[str, Any]:
    """Return what the command prints for a configuration."""
    with tempfile.TemporaryDirectory() as runs:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "trainer.memory_estimate",
                "--config",
                "-",
                "--json",
                "--runs",
                runs,
            ],
            input=json.dumps(config.to_dict()),
            capture_output=True,
            text=True,
        )
    if not done.stdout:
        raise SystemExit(f"The prediction failed: {done.stderr.strip()[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def true_peak(config: RunConfig) -> dict[str, Any]:
    """Train in a process of its own; return `peak` and, on CUDA, `reserved`."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fit_accuracy", "--truth", json.dumps(config.to_dict())],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"The run failed: {done.stderr.strip()[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure(config: RunConfig) -> dict[str, int]:
    """Train here and measure; the process should end then."""
    train = importlib.import_module("trainer.training.train").run
    torch = importlib.import_module("torch")
    with tempfile.TemporaryDirectory() as folder:
        if config.device != "cpu":
            status = train(config, Path(folder))
            found = {
                "peak": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }
        else:
            began: list[int] = []
            _note_begin(began)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ) as profile:
                status = train(config, Path(folder))
            found = {"peak": _host_peak(profile, began[0])}
        if status != "finished":
            reason = json.loads((Path(folder) / "run.json").read_text())["reason"]
            raise SystemExit(f"The run is {status}: {reason}")
    return found


def _note_begin(began: list[int]) -> None:
    """Keep the moment at which model and data are there, and the training is made."""
    state = importlib.import_module("trainer.training.state")
    original = state.Training.__init__

    def noted(self: Any, *args: Any) -> None:
        began.append(time.time_ns())
        original(self, *args)

    state.Training.__init__ = noted


def _host_peak(profile: Any, began_ns: int) -> int:
    """Return the highest sum of live allocations after a moment, counted from the beginning."""
    total = most = 0
    for when, size in sorted(_allocations(profile)):
        total += size
        if when >= began_ns:
            most = max(most, total)
    return most


def _allocations(profile: Any) -> Iterator[tuple[int, int]]:
    kind = importlib.import_module("torch")._C._profiler._EventType.Allocation
    stack = list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.typed[0] == kind and event.typed[1].device.type == "cpu":
            yield event.start_time_ns, event.typed[1].alloc_size


def compare(names: list[str], device: str) -> list[dict[str, Any]]:
    """Predict and measure each case, and print a line for it."""
    rows = []
    say(f"{'case':<22} {'predicted':>12} {'true':>12} {'error':>8} {'reserved':>9} {'seconds':>8}")
    for name in names:
        case = ON_CUDA.get(name, CASES[name]) if device != "cpu" else CASES[name]
        config = configured(case, device)
        guess, truth = predicted(config), true_peak(config)
        data = guess["outside"].get("data_set", 0)
        peak = truth["peak"] - data
        error = guess["predicted_peak_bytes"] / peak - 1
        reserved = None
        if "reserved" in truth:
            reserved = guess["predicted_reserved_bytes"] / truth["reserved"] - 1
        rows.append(
            {
                "case": name,
                "settings": case,
                "predicted": guess["predicted_peak_bytes"],
                "true": peak,
                "error": error,
                "reserved_error": reserved,
                "seconds": guess["seconds"],
                "parts": guess["parts"],
            }
        )
        shown = "" if reserved is None else f"{100 * reserved:+.1f} %"
        say(
            f"{name:<22} {guess['predicted_peak_bytes']:>12,} {peak:>12,} {100 * error:>+6.2f} % "
            f"{shown:>9} {guess['seconds']:>8.1f}"
        )
    return rows


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=sorted(CASES), action="append", metavar="CASE")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for quiet")
    parser.add_argument("--truth", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.truth:
        print(json.dumps(measure(RunConfig.from_dict(json.loads(options.truth)))))
        return
    wait_for_quiet(options.wait)
    load = os.getloadavg()[0]
    device = "cpu"
    if options.device == "cuda":
        found = importlib.import_module("trainer.devices").list_devices()
        device = next(one.id for one in found if one.cuda_index is not None)
    rows = compare(options.only or list(CASES), device)
    worst = max(abs(row["error"]) for row in rows)
    simulated = importlib.util.find_spec("cudasim") is not None and device != "cpu"
    results = {
        "targets": {"worst_error": at_most(worst, LIMITS[options.device])},
        "allocator": "the simulator's" if simulated else options.device,
        "on_a_gpu": "to be measured",
        "cases": rows,
    }
    report("fit_accuracy", {"device": options.device, "steps": STEPS}, load, results)


if __name__ == "__main__":
    main()
