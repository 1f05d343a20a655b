"""Measurements of collectives: torchrun in a child process, result files, and text.

The results are JSON files in `collectives` of the runs folder.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.common.files import atomic_write, read_json
from stepscope.common.formatting import format_bytes, format_short_time
from stepscope.distributed.collective_metrics import rate_text
from stepscope.run import folder_name, is_run_id
from trainer.collectives.plan import NCCL, CollectivePlan
from trainer.launch_commands import ONE_MACHINE
from trainer.runners.child_process import Child, ChildOutput, ChildState

FOLDER = "collectives"
SCHEMA = 1
MAX_BYTES = 16 * 2**20
LIMIT_S = 900.0
DISTURBED = 3  # Slowest over fastest round above which other work disturbed a result.
HEADING = f"{'operation':16s}{'size':>10s}{'time':>12s}{'algorithm':>14s}{'bus':>14s}"
_NAME = re.compile(r"(\d{8}-\d{6})(Z?)-([a-z]+)-(\d+)-(\d{3})")
# Seconds, bytes and bytes/s within a logarithmic axis.
_Measured = Annotated[float, msgspec.Meta(ge=1e-12, le=1e18)]


class ResultError(Exception):
    """A file that is not a measurement; the message has a remedy."""


class _Link(msgspec.Struct):
    name: str
    bytes_per_s: _Measured


class _Machine(msgspec.Struct):
    device: str = ""
    link: _Link | None = None


class _Document(msgspec.Struct):
    ranks: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    backend: str
    rows: list[Any]
    machine: _Machine | None = None


class _Row(msgspec.Struct):
    operation: str
    bytes: _Measured
    reason: str = ""
    seconds: _Measured = 1.0
    algorithm: _Measured = 1.0
    bus: _Measured = 1.0
    fastest_s: _Measured = 1.0
    slowest_s: _Measured = 1.0


def new_result_path(root: Path, backend: str, ranks: int) -> Path:
    """Return an unused path for a measurement that starts now."""
    for number in range(1000):
        name = folder_name(time.time(), f"{backend} {ranks}", f"{number:03d}")
        path = root / FOLDER / f"{name}.json"
        if not path.exists():
            return path
    raise FileExistsError(f"1000 measurements of this second in {root / FOLDER}")


def write_result(path: Path, document: Mapping[str, Any]) -> None:
    """Write a measurement atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(document, indent=1, allow_nan=False), durable=False)


def result_names(root: Path) -> list[str]:
    """Return the names of all measurements, newest first."""
    found = (path.stem for path in (root / FOLDER).glob("*.json"))
    return sorted(filter(is_run_id, found), reverse=True)


def result_label(name: str) -> str:
    """Return the local time, backend and ranks of a measurement from its name.

    Names without a Z after the time are in local time.

    >>> result_label("20261122-141500-gloo-2-000")
    '2026-11-22 14:15:00, gloo, 2 ranks'
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    stamp, utc, backend, ranks, number = match.groups()
    again = f" ({int(number) + 1})" if int(number) else ""
    try:
        when = datetime.strptime(stamp, "%Y%m%d-%H%M%S").replace(tzinfo=UTC if utc else None)
    except ValueError:
        return name
    return f"{when.astimezone():%Y-%m-%d %H:%M:%S}, {backend}, {ranks} ranks{again}"


def read_result(root: Path, name: str) -> dict[str, Any]:
    """Return the measurement with this name, without its invalid rows. Raises ResultError."""
    path = root / FOLDER / f"{name}.json"
    if not is_run_id(name) or not os.path.isfile(path):
        raise ResultError(f"measurement: {name[:120]!r} does not exist. Choose one from the list.")
    try:
        document: dict[str, Any] = read_json(path, MAX_BYTES)
        msgspec.convert(document, _Document)
    except (OSError, ValueError) as error:
        raise ResultError(f"measurement: {name} cannot be read ({error}). Delete it.") from error
    document["rows"] = [row for row in document["rows"] if _is_row(row)]
    return document


def _is_row(row: Any) -> bool:
    try:
        msgspec.convert(row, _Row)
    except msgspec.ValidationError:
        return False
    return "reason" in row or {"seconds", "algorithm", "bus"} <= row.keys()


def line(row: Mapping[str, Any]) -> str:
    """Return one result as a line.

    >>> line({"operation": "broadcast", "bytes": 2**20, "seconds": 1e-3, "algorithm": 1.0486e9,
    ...       "bus": 1.0486e9})
    'broadcast         1.00 MiB     1.00 ms     1.05 GB/s     1.05 GB/s'
    """
    start = f"{row['operation']:16s}{format_bytes(row['bytes']):>10s}"
    if "reason" in row:
        return f"{start}  not measured: {row['reason']}"
    algorithm, bus = rate_text(row["algorithm"]), rate_text(row["bus"])
    return f"{start}{format_short_time(row['seconds']):>12s}{algorithm:>14s}{bus:>14s}"


def closing(document: Mapping[str, Any]) -> list[str]:
    """Return sentences on the ranks, the link's speed, and the disturbed results."""
    machine = document.get("machine") or {}
    link = machine.get("link")
    ranks = f"{document['ranks']} ranks by {document['backend']} on {machine.get('device', '?')}"
    speed = "" if link is None else f", {link['name']}: {rate_text(link['bytes_per_s'])} each way"
    lines = [f"{ranks}{speed}."]
    measured = [row for row in document["rows"] if "reason" not in row]
    disturbed = sum((spread_of(row) or 0) > DISTURBED for row in measured)
    if disturbed:
        lines.append(
            f"Other work disturbed {disturbed} of {len(measured)} results: their slowest round "
            f"took more than {DISTURBED} times as long as the fastest. Measure again while the "
            "machine is idle."
        )
    return lines


def spread_of(row: Mapping[str, Any]) -> float | None:
    """Return a result's slowest round over its fastest; None if unknown."""
    fastest, slowest = row.get("fastest_s"), row.get("slowest_s")
    return slowest / fastest if fastest and slowest else None


class Measurement(Child):
    """One measurement, saved in `root` / "collectives" even if stopped. Thread-safe.

    `saved` is the name of the result's file, or None. Raises OSError if torchrun cannot be started.
    """

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
        super().__init__([*agent, *measuring_arguments(plan)], limit_s=LIMIT_S, env=env)

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
        texts = [line.partition(": ")[2] for line in lines if line.startswith("[rank")]
        causes = [text for text in texts if text and not text.startswith((" ", "Traceback"))]
        cause = (causes[:1] or lines[-1:] or [""])[0]
        return f"torchrun ended with exit code {code}. {cause[:300]}".strip()


def measuring_arguments(plan: CollectivePlan) -> list[str]:
    """Return torchrun's arguments for the ranks."""
    rank = ("-m", "trainer.collectives.rank", msgspec.json.encode(plan).decode())
    return [*ONE_MACHINE, f"--nproc-per-node={plan.ranks}", *rank]
