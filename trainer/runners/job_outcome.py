"""The outcome of a distributed run, from its rank files and the output of torchrun.

A killed rank records no end, and only its parent torchrun knows the signal. torchrun's messages are
no public interface: without them the outcome names only the rank. Does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.common.files import is_own_folder, read_tail
from stepscope.host.usage import kills_since
from stepscope.run import RunError, RunStatus, read_run, write_run_json
from stepscope.run.rank_info import UNREADABLE, now_of, numbers_with, read_run_json

log = logging.getLogger(__name__)

LOG_BYTES = 200_000  # end of torchrun's output: each attempt may print a traceback per rank
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
_ERROR_LINE = re.compile(r"(?:\[\w+\]:)?\s*((?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception): .+)")
_TORCHRUN = ("ChildFailedError", "SignalException")


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How an attempt ended: `short` is a clause such as "rank 2 was killed (SIGKILL)".

    `rank` is the cause, or None. `in_order`: the ranks recorded their end themselves.
    """

    status: RunStatus
    short: str
    rank: int | None = None
    exit_code: int | None = None
    in_order: bool = False

    @property
    def sentence(self) -> str:
        """The clause as a sentence, for the header of the run."""
        return f"{self.short[0].upper()}{self.short[1:]}."


def end_of(folder: Path, log_file: Path) -> JobOutcome:
    """Return the outcome of an attempt whose processes have ended."""
    with contextlib.suppress(*UNREADABLE):  # recorded already
        end = read_run_json(folder, 0)["job_end"]
        return JobOutcome(
            RunStatus(end["status"]), str(end["short"]), end["rank"], end["exit_code"]
        )
    text = log_text(log_file)
    failures = [(int(code), int(pid)) for code, pid in _FAILED.findall(text)]
    code, pid = failures[-1] if failures else (None, None)
    ranks: dict[int, dict[str, Any]] = {}
    for number in numbers_with(folder, "sqlite"):
        with contextlib.suppress(*UNREADABLE):
            ranks[number] = read_run_json(folder, number)
    failed = next((rank for rank, known in ranks.items() if known.get("pid") == pid), None)
    if failed is not None and "ended" not in ranks[failed] and "failure" not in ranks[failed]:
        return _unrecorded(failed, code, ranks[failed])
    try:
        run = read_run(folder)
    except RunError:
        ranks = {}
    if not ranks:
        return JobOutcome(RunStatus.FAILED, _start_failure(text, code))
    if run.status is RunStatus.CRASHED:
        known = ranks.get(run.cause, {})
        return _unrecorded(run.cause_rank, code if known.get("pid") == pid else None, known)
    if run.status.live:  # a rank of another host with a recent heartbeat
        return JobOutcome(RunStatus.FAILED, "a rank failed, or its machine is gone", None, code)
    if run.status in (RunStatus.STOPPED, RunStatus.FINISHED):
        how = f"{run.status} after step {run.run_json.get('step', 0):,}"
        return JobOutcome(run.status, how, in_order=True)
    reason = (run.reason or "it gives no reason").rstrip(".")
    cause = reason.removeprefix(f"Rank {run.cause_rank}: ")
    return JobOutcome(run.status, f"rank {run.cause_rank} failed: {cause}", run.cause_rank, code)


def _start_failure(text: str, code: int | None) -> str:
    """Return a clause with the reason why no rank recorded anything."""
    lines = (_ERROR_LINE.fullmatch(line.strip()) for line in text.splitlines())
    errors = [line[1] for line in lines if line and not any(name in line[1] for name in _TORCHRUN)]
    number = "" if code is None else f" (exit code {code})"  # negative for a signal
    last = errors[-1:] or text.strip().splitlines()[-1:] or ["torchrun has printed nothing"]
    return f"the ranks could not start{number}: {last[0][:300].rstrip('.')}"


def ended_by_signal(log_file: Path) -> bool:
    """Return True if a signal from outside ended torchrun; the ranks record their end."""
    return "SignalException: " in log_text(log_file)


def note_job_end(folder: Path, end: JobOutcome, restarted_as: str | None = None) -> None:
    """Record the outcome of an ended attempt in run.json, unless another user owns the folder."""
    if not is_own_folder(folder):
        return
    try:
        run_json = read_run_json(folder, 0)
        if not end.in_order:
            run_json["job_end"] = {
                "status": end.status,
                "reason": end.sentence,
                "short": end.short,
                "rank": end.rank or 0,
                "exit_code": end.exit_code,
            }
        if RunStatus(run_json["status"]).live:
            run_json |= {"status": end.status, "reason": end.sentence, "ended": now_of(run_json)}
        if restarted_as is not None:
            run_json["restarted_as"] = restarted_as
        write_run_json(folder, run_json)
    except UNREADABLE as error:
        log.warning("stepscope: %s: its end could not be noted: %s", folder.name, error)


def log_text(path: Path) -> str:
    try:
        return read_tail(path, LOG_BYTES)
    except OSError:
        return ""


def _unrecorded(rank: int, code: int | None, known: Mapping[str, Any]) -> JobOutcome:
    """Return the outcome for a rank that ended without a record."""
    if code == -signal.SIGKILL and kills_since(known.get("oom_kills")):
        how = (
            "was killed by the system (SIGKILL): out of memory. Use a smaller batch, fewer "
            "ranks or fewer num_workers"
        )
    elif code is None:
        how = "was killed, or exited without a message"
    elif code < 0:
        how = f"was killed ({_signal(code)})"
    else:
        how = f"exited without a message (exit code {code})"
    return JobOutcome(RunStatus.FAILED, f"rank {rank} {how}", rank, code)


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
