"""Is the rank that hangs named while it hangs? Hangs planted in real torchrun jobs over gloo.

    python -m benchmarks.hangs [--runs 5] [--ranks 2]

Each job is `tests/scripts/hanging.py` under `stepscope watch`; one of its ranks hangs at step 40.
The folder is looked at five times a second, as a page does. `seconds` is the time from the last
step to the moment when the right rank and cause are named, None where they are not within a minute.
Target: within 15 s in every job. A job takes some 15 s on a quiet machine, most of it to start.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import at_most, report, say, wait_for_quiet
from stepscope.distributed.hangs.cases import Hang, HangCause
from stepscope.distributed.hangs.diagnose import hang_of
from tests.support.hanging_job import STARTS_S, Job, hanging

KINDS = {
    "sleep": HangCause.NOT_ENTERED,
    "input": HangCause.NOT_ENTERED,
    "forward": HangCause.NOT_ENTERED,
    "stop": HangCause.STOPPED,
    "mismatch": HangCause.MISMATCH,
    "order": HangCause.ORDER,
}
"""Ways to hang, as the script knows them, and what must be found."""
NAMED_S = 15.0
GIVEN_UP_S = 60.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Named:
    """How one planted hang was named; `seconds` since the last step, None where it was not."""

    what: str
    seconds: float | None
    text: str | None


def plant(what: str, ranks: int) -> Named:
    """Run one job in which rank 1 hangs, and wait until it is named."""
    with tempfile.TemporaryDirectory() as folder, hanging(what, Path(folder), ranks=ranks) as job:
        until = time.monotonic() + STARTS_S + GIVEN_UP_S
        while time.monotonic() < until and job.process.poll() is None:
            found = _look(job)
            if found is not None and found.cause is KINDS[what] and 1 in found.ranks:
                return Named(what, time.time() - found.since, found.text)
            if found is not None and found.silent_s > GIVEN_UP_S:
                break
            time.sleep(POLL_S)
        return Named(what, None, None)


def _look(job: Job) -> Hang | None:
    run = job.run
    return None if run is None else hang_of(run)


def planted(runs: int, ranks: int) -> Iterator[Named]:
    """Yield every job's result, the kinds in turn."""
    for number in range(runs):
        for what in KINDS:
            named = plant(what, ranks)
            say(f"{number + 1}/{runs} {what}: {named.seconds} s; {named.text}")
            yield named


def measure(runs: int, ranks: int) -> dict[str, Any]:
    """Return the seconds of each kind, and the target over all jobs."""
    seconds: dict[str, list[float | None]] = {what: [] for what in KINDS}
    for named in planted(runs, ranks):
        seconds[named.what].append(named.seconds)
    every = [one for some in seconds.values() for one in some]
    known = [one for one in every if one is not None]
    worst = max(known) if len(known) == len(every) else None
    return {"seconds": seconds, "targets": {"named_within_s": at_most(worst, NAMED_S)}}


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="jobs of each kind")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--wait-quiet", type=float, default=0, metavar="SECONDS")
    options = parser.parse_args()
    wait_for_quiet(options.wait_quiet)
    load = os.getloadavg()[0]
    facts = {"runs": options.runs, "ranks": options.ranks}
    report("hangs", facts, load, measure(options.runs, options.ranks))


if __name__ == "__main__":
    main()
