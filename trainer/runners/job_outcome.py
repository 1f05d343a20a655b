"""How a job of several ranks ended, from its rank files and from what torchrun has printed.

A killed process writes nothing more, and only its parent knows the signal: torchrun prints it. The
message is no public interface: without it the sentence names the rank alone. This module does not
import torch.
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

LOG_BYTES = 200_000
"""End of torchrun's output that is read: each attempt may print a traceback a rank."""
TOLD_BYTES = 2000
"""Characters at the end of its output in which torchrun names the signal that has ended it."""
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
_ERROR_LINE = re.compile(r"(?:\[\w+\]:)?\s*((?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception): .+)")
_OF_TORCHRUN = ("ChildFailedError", "SignalException")
_PORT_TAKEN = ("EADDRINUSE", "ddress already in use")


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How an attempt ended: `short` is a clause without a period, as "rank 2 was killed (SIGKILL)".

    `rank` caused it, None where nobody knows; `exit_code` is negative for a signal. `in_order`: the
    ranks have stopped or finished and have said so themselves.
    """

    status: RunStatus
    short: str
    rank: int | None = None
    exit_code: int | None = None
    in_order: bool = False

    @property
    def sentence(self) -> str:
        """What the header of the run's page says."""
        return f"{self.short[0].upper()}{self.short[1:]}."


def end_of(folder: Path, log_file: Path) -> JobOutcome:
    """Return how the attempt in `folder` ended, all of whose processes are gone."""
    if (told := _told(folder)) is not None:
        return told
    text = log_text(log_file)
    failures = [(int(code), int(pid)) for code, pid in _FAILED.findall(text)]
    ranks = _ranks(folder)
    code, pid = failures[-1] if failures else (None, None)
    seen_first = next((rank for rank, known in ranks.items() if known.get("pid") == pid), None)
    if seen_first is not None and _silent(ranks[seen_first]):
        return _gone(seen_first, code, ranks[seen_first])
    try:
        run = read_run(folder)
    except RunError:
        ranks = {}
    if not ranks:
        return JobOutcome(RunStatus.FAILED, not_started_text(text, code))
    if run.status is RunStatus.CRASHED:
        known = ranks.get(run.cause, {})
        return _gone(run.cause_rank, code if known.get("pid") == pid else None, known)
    if run.status.live:  # of another host, whose last sign of life is young
        return JobOutcome(RunStatus.FAILED, "a rank failed, or its machine is gone", None, code)
    if run.status in (RunStatus.STOPPED, RunStatus.FINISHED):
        how = f"{run.status} after step {run.run_json.get('step', 0):,}"
        return JobOutcome(run.status, how, in_order=True)
    reason = (run.reason or "it gives no reason").rstrip(".")
    own = reason.removeprefix(f"Rank {run.cause_rank}: ")
    return JobOutcome(run.status, f"rank {run.cause_rank} failed: {own}", run.cause_rank, code)


def not_started_text(text: str, code: int | None) -> str:
    """Return a clause that says why no rank got as far as to record anything."""
    if any(words in text for words in _PORT_TAKEN):
        return "the job could not start: another program uses its port. Choose another one"
    lines = (_ERROR_LINE.fullmatch(line.strip()) for line in text.splitlines())
    errors = [line[1] for line in lines if line is not None]
    own = [line for line in errors if not any(name in line for name in _OF_TORCHRUN)]
    if code is not None and code < 0:
        return f"the job could not start: a rank was killed ({_signal(code)})"
    number = "" if code is None else f" (exit code {code})"
    last = own[-1:] or text.strip().splitlines()[-1:] or ["torchrun has printed nothing"]
    return f"the ranks could not start{number}: {last[0][:300].rstrip('.')}"


def was_told_to_end(log_file: Path) -> bool:
    """Say whether torchrun has ended by a signal from outside: the ranks say how they ended."""
    return "SignalException: " in log_text(log_file)[-TOLD_BYTES:]


def note_job_end(folder: Path, end: JobOutcome, restarted_as: str | None = None) -> None:
    """Keep in run.json how an attempt ended, whose processes are all gone.

    An end in order stands there already, with its reason. Does nothing in a folder of another user.
    """
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
    """Return the end of what torchrun has printed; "" where it has no file."""
    try:
        return read_tail(path, LOG_BYTES)
    except OSError:
        return ""


def _gone(rank: int, code: int | None, known: Mapping[str, Any]) -> JobOutcome:
    """Return the end of a rank that could not say why it ended."""
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


def _told(folder: Path) -> JobOutcome | None:
    """Return how the attempt ended, if somebody has noted it already."""
    with contextlib.suppress(*UNREADABLE):
        told = read_run_json(folder, 0)["job_end"]
        return JobOutcome(
            RunStatus(told["status"]), str(told["short"]), told["rank"], told["exit_code"]
        )
    return None


def _silent(run_json: Mapping[str, Any]) -> bool:
    """Say whether a rank has written no end."""
    try:
        return RunStatus(run_json["status"]).live and "failure" not in run_json
    except (KeyError, ValueError):
        return True


def _ranks(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what each rank that has begun to record says of itself, by its number."""
    found = {}
    for number in numbers_with(folder, "sqlite"):
        with contextlib.suppress(*UNREADABLE):
            found[number] = read_run_json(folder, number)
    return found


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
