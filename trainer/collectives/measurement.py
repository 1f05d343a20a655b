"""Measurements of collectives: plan, torchrun in a child process, JSON files. No torch import."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.common.files import atomic_write, read_json
from stepscope.common.formatting import format_bytes, format_short_time
from stepscope.distributed import ONE_MACHINE
from stepscope.distributed.collective_metrics import rate_text
from stepscope.host.child_process import Child, ChildOutput, ChildState
from stepscope.run import folder_name, is_run_id
from trainer.runners.child_process import PROJECT

GLOO, NCCL = "gloo", "nccl"
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
KIB, MIB, GIB = 2**10, 2**20, 2**30
MAX_RANKS = 64
_UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB}
FOLDER = "collectives"
SCHEMA = 1
MAX_BYTES = 16 * 2**20
LIMIT_S = 900.0
# Seconds, bytes and bytes/s within a logarithmic axis.
_Measured = Annotated[float, msgspec.Meta(ge=1e-12, le=1e18)]


class PlanError(ValueError):
    """An invalid plan; the message has the field, its valid values, and the given one."""


def sizes_between(first: int, last: int) -> tuple[int, ...]:
    """Return the sizes from `first` up to `last` in steps of 4×."""
    return tuple(size for power in range(32) if (size := first * 4**power) <= last)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivePlan:
    """One measurement; `sizes` are bytes of the whole array, as in nccl-tests. Raises PlanError."""

    backend: str = GLOO
    ranks: int = 2
    sizes: tuple[int, ...] = sizes_between(KIB, 16 * MIB)

    def __post_init__(self) -> None:
        if self.backend not in (GLOO, NCCL):
            raise PlanError(f"backend: gloo for CPUs or nccl for GPUs, got {self.backend!r}.")
        if not 2 <= self.ranks <= MAX_RANKS:
            raise PlanError(f"ranks: 2 to {MAX_RANKS} processes, got {self.ranks}.")
        if not self.sizes or not all(KIB <= size <= 16 * GIB for size in self.sizes):
            raise PlanError(f"sizes: 1 KiB to 16 GiB each, got {list(self.sizes)} bytes.")


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in a text such as "1K..64M" or "1K,1M,16M". Raises PlanError."""
    first, is_range, last = text.partition("..")
    if not is_range:
        return tuple(map(_size, text.split(",")))
    return sizes_between(_size(first), _size(last))


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    if match is None:
        raise PlanError(f"sizes: such as 1K..64M or 1K,1M with K, M or G, got {text[:80]!r}.")
    return int(match[1]) * _UNITS[match[2]]


def refusal(plan: CollectivePlan, gpus: int, no_gpu: str | None) -> str | None:
    """Return why this machine cannot measure the plan; `no_gpu` is why torch has no CUDA device."""
    if plan.backend != NCCL or gpus >= plan.ranks:
        return None
    remedy = no_gpu or "Reduce the ranks."
    return f"NCCL needs a GPU for each of the {plan.ranks} ranks; found {gpus}. {remedy}"


class ResultError(Exception):
    """A file that is not a measurement; the message has a remedy."""


class _Link(msgspec.Struct):
    name: str
    bytes_per_s: _Measured


class _Machine(msgspec.Struct):
    device: str = ""
    simulated: bool = False
    link: _Link | None = None


class _Row(msgspec.Struct):
    operation: str
    bytes: _Measured
    reason: str | msgspec.UnsetType = msgspec.UNSET
    seconds: _Measured | msgspec.UnsetType = msgspec.UNSET
    algorithm: _Measured | msgspec.UnsetType = msgspec.UNSET
    bus: _Measured | msgspec.UnsetType = msgspec.UNSET
    fastest_s: _Measured = 1.0
    slowest_s: _Measured = 1.0

    def __post_init__(self) -> None:
        given = {part is not msgspec.UNSET for part in (self.seconds, self.algorithm, self.bus)}
        if given != {self.reason is msgspec.UNSET}:
            raise ValueError("a row must have either its results or a reason")


class _Document(msgspec.Struct):
    ranks: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    backend: str
    rows: list[_Row]
    machine: _Machine | None = None


def new_result_path(root: Path, backend: str, ranks: int) -> Path:
    """Return an unused path for a measurement that starts now."""
    name = folder_name(time.time(), f"{backend} {ranks}", secrets.token_hex(4))
    return root / FOLDER / f"{name}.json"


def write_result(path: Path, document: Mapping[str, Any]) -> None:
    """Write a measurement atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(document, indent=1, allow_nan=False), durable=False)


def result_names(root: Path) -> list[str]:
    """Return the names of all measurements, newest first."""
    found = (path.stem for path in (root / FOLDER).glob("*.json"))
    return sorted(filter(is_run_id, found), reverse=True)


def read_result(root: Path, name: str) -> dict[str, Any]:
    """Return the measurement with this name. Raises ResultError."""
    path = root / FOLDER / f"{name}.json"
    if not is_run_id(name) or not os.path.isfile(path):
        raise ResultError(f"measurement: {name[:120]!r} does not exist. Choose one from the list.")
    try:
        document: dict[str, Any] = read_json(path, MAX_BYTES)
        msgspec.convert(document, _Document)
    except (OSError, ValueError) as error:
        raise ResultError(f"measurement: {name} cannot be read ({error}). Delete it.") from error
    return document


def terminal_text(document: Mapping[str, Any]) -> str:
    heading = f"{'operation':16s}{'size':>10s}{'time':>12s}{'algorithm':>14s}{'bus':>14s}"
    return "\n".join([heading, *map(_line, document["rows"]), closing(document)])


def _line(row: Mapping[str, Any]) -> str:
    start = f"{row['operation']:16s}{format_bytes(row['bytes']):>10s}"
    if "reason" in row:
        return f"{start}  not measured: {row['reason']}"
    algorithm, bus = rate_text(row["algorithm"]), rate_text(row["bus"])
    return f"{start}{format_short_time(row['seconds']):>12s}{algorithm:>14s}{bus:>14s}"


def closing(document: Mapping[str, Any]) -> str:
    """Return a sentence on the ranks, the device and its link's speed."""
    machine = document.get("machine") or {}
    link = machine.get("link")
    ranks = f"{document['ranks']} ranks by {document['backend']} on {machine.get('device', '?')}"
    speed = "" if link is None else f", {link['name']}: {rate_text(link['bytes_per_s'])} each way"
    untimed = " The GPUs are simulated, and these times are not those of a GPU."
    return f"{ranks}{speed}.{untimed if machine.get('simulated') else ''}"


def spread_of(row: Mapping[str, Any]) -> float | None:
    """Return a result's slowest round over its fastest; None if unknown."""
    fastest, slowest = row.get("fastest_s"), row.get("slowest_s")
    return slowest / fastest if fastest and slowest else None


class Measurement(Child):
    """One measurement; `saved` is the name of its file, or None. Thread-safe. Raises OSError."""

    def __init__(self, plan: CollectivePlan, root: Path) -> None:
        self.plan = plan
        self.saved: str | None = None
        self._root = root
        self._rows: list[dict[str, Any]] = []
        self._machine: dict[str, Any] = {}
        self._created = time.time()
        self._complete = False
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if plan.backend != NCCL:
            env["CUDA_VISIBLE_DEVICES"] = ""
        # The agent runs torchrun, and ends when this process closes its stdin.
        agent = [sys.executable, "-m", "trainer.runners.agent"]
        super().__init__(
            [*agent, *measuring_arguments(plan)], limit_s=LIMIT_S, env=env, cwd=PROJECT
        )

    def _now(self) -> ChildOutput:
        return ChildOutput(ChildState.RUNNING, self.seconds, answer=self._document("running"))

    def _document(self, status: str) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "created": self._created,
            "host": socket.gethostname(),
            "status": status,
            **asdict(self.plan),
            "machine": dict(self._machine),
            "rows": list(self._rows),
        }

    def _take(self, content: dict[str, Any]) -> None:
        self._machine = content.get("machine") or self._machine
        self._rows += [content["result"]] if "result" in content else []
        self._complete = self._complete or "end" in content

    def _result(self, code: int) -> ChildOutput:
        state, reason = ChildState.FINISHED, None
        if not self._complete:
            state = ChildState.STOPPED if self._stopping else ChildState.FAILED
            reason = None if self._stopping else self._why(code)
        document = self._document(state) | {"reason": reason}
        if any("bus" in row for row in self._rows):
            try:
                path = new_result_path(self._root, self.plan.backend, self.plan.ranks)
                write_result(path, document)
                self.saved = path.stem
            except (OSError, ValueError) as error:
                reason = f"The results could not be saved: {error}."
        return ChildOutput(state, self.seconds, answer=document, reason=reason)

    def _why(self, code: int) -> str:
        if self._late:
            return f"Ended after the limit of {LIMIT_S / 60:.0f} min. Measure fewer sizes."
        lines = self._error_lines()  # torchrun's summary follows the rank's error
        causes = re.findall(r"^\[rank\d+\]: ([\w.]+: .*)", "\n".join(lines), re.MULTILINE)
        cause = (causes[:1] or lines[-1:] or [""])[0]
        return f"torchrun ended with exit code {code}. {cause[:300]}".strip()


def measuring_arguments(plan: CollectivePlan) -> list[str]:
    sizes = ",".join(map(str, plan.sizes))
    ranks = f"--nproc-per-node={plan.ranks}"
    return [*ONE_MACHINE, ranks, "-m", "trainer.collectives.rank", plan.backend, sizes]
