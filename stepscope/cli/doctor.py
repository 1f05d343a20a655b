"""`stepscope doctor`: what was found on this machine, what is missing, and why.

`findings` is pure: facts in, judgement out. "broken" is what should work and does not; what is not
there is only "missing". A machine without a GPU is in order.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from stepscope.cli.survey import Facts, Gpu, gather
from stepscope.formatting import format_bytes

TORCH_TESTED = ((2, 11), (2, 15))
"""Oldest and newest version of torch that `watch`, `init` and the hooks are tested with."""
LOW_SPACE = 2**30
SMALL_SHARED_MEMORY = 2**30


class Mark(StrEnum):
    """How a part stands."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


_SIGNS = {Mark.OK: "ok", Mark.MISSING: "–", Mark.BROKEN: "✗"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `remedy` is a sentence, or empty."""

    mark: Mark
    what: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{_SIGNS[self.mark]:<4}{self.what}: {self.detail.rstrip('.')}."
        return f"{line} {self.remedy}" if self.remedy else line


def main(root: Path, *, as_json: bool = False) -> int:
    """Print the report; return 1 where something that should work does not."""
    facts = gather(root)
    found = list(findings(facts))
    broken = sum(finding.mark is Mark.BROKEN for finding in found)
    if as_json:
        report = {
            "ok": not broken,
            "findings": [dataclasses.asdict(one) for one in found],
            "facts": dataclasses.asdict(facts),
        }
        print(json.dumps(report, indent=1))
        return 1 if broken else 0
    for finding in found:
        print(finding)
    print()
    if broken:
        print(f"{broken} thing{'s do' if broken > 1 else ' does'} not work; see ✗ above.")
    else:
        print("Recording works here.")
    return 1 if broken else 0


def findings(facts: Facts) -> Iterator[Finding]:
    """Judge the facts, one part after another."""
    yield Finding(Mark.OK, "Python", f"{facts.python} ({facts.executable})")
    yield Finding(Mark.OK, "stepscope", facts.version)
    yield _recording(facts)
    yield Finding(Mark.OK, "SQLite", facts.sqlite)
    yield _nvml(facts)
    for gpu in facts.gpus:
        yield _gpu(gpu)
    yield _torch(facts)
    yield from _torch_version(facts)
    if facts.visible_devices is not None:
        yield Finding(
            Mark.OK,
            "CUDA_VISIBLE_DEVICES",
            f"{facts.visible_devices!r}: torch sees these only; Stepscope lists every GPU by UUID",
        )
    if facts.mps and facts.gpus:
        yield Finding(
            Mark.OK,
            "MPS",
            "a pipe directory is there: with MPS, utilization and power are of "
            "all its clients together",
        )
    yield from _limits(facts)
    yield _page(facts)
    yield _export(facts, "pyarrow", "parquet")
    yield _export(facts, "tensorboard", "tensorboard")


def _recording(facts: Facts) -> Finding:
    if facts.recording_error is not None:
        return Finding(
            Mark.BROKEN,
            "run folder",
            f"{facts.runs} cannot hold a run: {facts.recording_error}",
            "Set STEPSCOPE_RUNS to a folder that can be written.",
        )
    detail = facts.runs
    if facts.free is not None:
        detail += f", {format_bytes(facts.free)} free"
        if facts.free < LOW_SPACE:
            return Finding(
                Mark.BROKEN,
                "run folder",
                detail,
                "A run takes some 200 MB a day; free disk space, or set STEPSCOPE_RUNS.",
            )
    if facts.journal == "delete":
        detail += f"; a network file system ({facts.file_system}), so with a rollback journal"
    return Finding(Mark.OK, "run folder", detail)


def _nvml(facts: Facts) -> Finding:
    if facts.nvml_reason is None:
        count = len(facts.gpus)
        detail = f"driver {facts.driver}, {count} GPU{'s' if count > 1 else ''}"
        return Finding(Mark.OK, "NVIDIA driver", detail)
    if facts.nvml_broken:
        return Finding(Mark.BROKEN, "NVIDIA driver", facts.nvml_reason)
    if facts.device_nodes:
        return Finding(
            Mark.BROKEN,
            "NVIDIA driver",
            f"{facts.nvml_reason} Yet /dev/nvidiactl is there",
            "Check that nvidia-smi works here.",
        )
    if _torch_sees_gpu(facts):
        return Finding(
            Mark.BROKEN,
            "NVIDIA driver",
            f"{facts.nvml_reason} Yet torch sees a GPU",
            "Utilization, power and temperature will be missing.",
        )
    if facts.pci_gpu:
        return Finding(
            Mark.MISSING,
            "NVIDIA driver",
            f"{facts.nvml_reason} An NVIDIA GPU is on the PCI bus",
            "Install its driver; in a container, start it with access to the GPU (--gpus all).",
        )
    return Finding(Mark.MISSING, "NVIDIA driver", f"{facts.nvml_reason} No GPU values then")


def _gpu(gpu: Gpu) -> Finding:
    what = f"GPU {gpu.nvml_index}"
    size = "" if gpu.memory_total is None else f", {format_bytes(gpu.memory_total)}"
    detail = f"{gpu.name}{size}, {gpu.uuid}, {gpu.read} metrics"
    if gpu.lost is not None:
        return Finding(
            Mark.BROKEN,
            what,
            f"{gpu.name}, {gpu.uuid}: {gpu.lost}",
            "Look for 'Xid' in dmesg; the GPU may need a reset.",
        )
    if gpu.mig:
        detail += "; MIG is on, so its utilization is not given"
    if not gpu.missing:
        return Finding(Mark.OK, what, detail)
    reasons: dict[str, list[str]] = {}
    for key, reason in gpu.missing.items():
        reasons.setdefault(reason, []).append(key)
    words = [f"{', '.join(keys)} ({reason})" for reason, keys in reasons.items()]
    remedy = ""
    if "permission" in reasons:
        remedy = "Ask the administrator to let ordinary users read the GPU's counters."
    mark = Mark.OK if gpu.read else Mark.BROKEN
    return Finding(mark, what, f"{detail}; without {'; '.join(words)}", remedy)


def _torch_sees_gpu(facts: Facts) -> bool:
    return bool(facts.torch and facts.torch.get("available") and facts.torch.get("devices"))


def _torch(facts: Facts) -> Finding:
    torch = facts.torch
    if torch is None:
        return Finding(
            Mark.MISSING,
            "torch",
            "not installed in this environment",
            "'stepscope record' works without it; a training script needs it.",
        )
    version = torch["version"]
    if "error" in torch:
        return Finding(
            Mark.BROKEN,
            "torch",
            f"{version} cannot be imported: {torch['error']}",
            "Install it again.",
        )
    if torch["cuda"] is None:
        return _torch_without_cuda(facts, version)
    built = f"{version}, built for CUDA {torch['cuda']}"
    if torch["available"]:
        return _torch_devices(facts, built, torch["devices"])
    if not facts.gpus:
        return Finding(Mark.MISSING, "torch", f"{built}; there is no GPU for it here")
    if facts.visible_devices is not None and facts.visible_devices.strip() in ("", "-1"):
        return Finding(
            Mark.MISSING,
            "torch",
            f"{built}; CUDA_VISIBLE_DEVICES hides every GPU from it",
            "Unset it to train on a GPU.",
        )
    said = next(iter(torch["warnings"]), "it gives no reason")
    return Finding(
        Mark.BROKEN,
        "torch",
        f"{built}, does not see the GPU: {said}",
        "Install a build of torch for this driver: https://pytorch.org/get-started.",
    )


def _torch_version(facts: Facts) -> Iterator[Finding]:
    """Say so where nobody has tried this version of torch."""
    found = re.match(r"(\d+)\.(\d+)", facts.torch["version"]) if facts.torch else None
    if found is None:
        return
    oldest, newest = TORCH_TESTED
    if not oldest <= (int(found[1]), int(found[2])) <= newest:
        tested = " to ".join(f"{major}.{minor}" for major, minor in TORCH_TESTED)
        yield Finding(
            Mark.MISSING,
            "torch's version",
            f"{found[0]}; Stepscope is tested with {tested}",
            "Training runs as without us; a value that cannot be captured is missing, and stderr "
            "says which.",
        )


def _torch_without_cuda(facts: Facts, version: str) -> Finding:
    if facts.torch and facts.torch["hip"]:
        return Finding(
            Mark.MISSING,
            "torch",
            f"{version}, built for ROCm",
            "Stepscope reads NVIDIA GPUs only; training and host values are recorded.",
        )
    if not facts.gpus:
        return Finding(Mark.OK, "torch", f"{version}, a build without CUDA")
    return Finding(
        Mark.BROKEN,
        "torch",
        f"{version} is a build without CUDA, and there is a GPU",
        "Install a CUDA build: https://pytorch.org/get-started.",
    )


def _torch_devices(facts: Facts, built: str, names: list[str]) -> Finding:
    count = f"{len(names)} GPU{'s' if len(names) != 1 else ''}"
    if facts.gpus and len(names) != len(facts.gpus) and facts.visible_devices is None:
        why = "MIG" if any(gpu.mig for gpu in facts.gpus) else "an unsupported GPU, or its rights"
        detail = f"{built}; sees {count} of the driver's {len(facts.gpus)} ({why})"
        return Finding(Mark.OK, "torch", detail)
    return Finding(Mark.OK, "torch", f"{built}; sees {count}")


def _limits(facts: Facts) -> Iterator[Finding]:
    """What a container may use, where that is less than the host has."""
    limits = []
    if facts.memory_limit is not None:
        limits.append(f"{format_bytes(facts.memory_limit)} of memory")
    if facts.cpu_limit is not None:
        limits.append(f"{facts.cpu_limit:g} CPUs")
    if limits:
        yield Finding(
            Mark.OK,
            "container",
            f"limited to {' and '.join(limits)}; host/… metrics are those of the whole host",
        )
    if facts.shared_memory is not None and facts.shared_memory < SMALL_SHARED_MEMORY:
        yield Finding(
            Mark.MISSING,
            "/dev/shm",
            f"only {format_bytes(facts.shared_memory)}: DataLoader workers pass batches through it",
            "In a container, start it with --shm-size=8g.",
        )


def _page(facts: Facts) -> Finding:
    if facts.page is not None:
        return Finding(Mark.MISSING, "page", facts.page)
    versions = ", ".join(f"{name} {facts.packages.get(name)}" for name in ("streamlit", "plotly"))
    return Finding(Mark.OK, "page", f"'stepscope ui' opens it ({versions})")


def _export(facts: Facts, package: str, form: str) -> Finding:
    what = f"export to {form}"
    version = facts.packages.get(package)
    if version is not None:
        return Finding(Mark.OK, what, f"{package} {version}")
    return Finding(
        Mark.MISSING, what, f"{package} is not installed", f"Run 'pip install {package}'."
    )
