"""What a recorder costs a step, and what it loses when its process is killed.

    python -m benchmarks.recorder [--quick] [--no-peers] [--rounds 5] [--wait-quiet SECONDS]

Stepscope beside trackio, TensorBoard's SummaryWriter, wandb offline, aim and mlflow (see peers/),
four metrics a step, as fast as the loop can: µs a call (median, p99), CPU seconds per 10^5 steps,
bytes a point. Rounds are interleaved, a fresh process each. Then each logs 1000 steps/s and is
killed with SIGKILL after two seconds; what its own reader then finds is compared to what was
logged. The row `nothing` is an empty call: what the clock and the loop take, subtracted nowhere.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.peers.adapters import METRICS, NOTHING, OURS
from benchmarks.peers.environment import Peers, environment, last_line, prepare, without
from benchmarks.recording_child import adopt_orphans
from benchmarks.report import at_most, say

STEPS = 100_000
FEWER = {"tensorboard": 20_000, "wandb": 20_000, "aim": 5_000, "mlflow": 500}
"""Steps of the slow ones; their CPU is scaled up, their bytes counted without the empty store."""
MEDIAN_US, P99_US, CPU_S, POINT_BYTES = 1.0, 5.0, 0.5, 14.0
CHILD_TIMEOUT_S = 180
STARTED_S = 60.0
LIVED_S = 2.0
SURVIVORS_S = 3.0
"""How long processes that a recorder has besides the killed one may go on writing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How often to measure, and the share of the steps to take."""

    rounds: int = 5
    kills: int = 3
    our_kills: int = 10
    share: float = 1.0

    def steps(self, name: str) -> int:
        """Return the steps of a round of this recorder."""
        return max(100, int(FEWER.get(name, STEPS) * self.share))

    def kills_of(self, name: str) -> int:
        """Return how often this recorder is killed."""
        return {NOTHING: 0, OURS: self.our_kills}.get(name, self.kills)


class ChildError(Exception):
    """A recorder that failed; the message is the last line of what it said."""


def child(peers: Peers, folder: Path, mode: str, name: str, *args: str) -> dict[str, Any]:
    """Run the child to its end; return its result. Raises ChildError."""
    try:
        done = subprocess.run(
            command(peers, mode, name, folder, *args),
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"no end in {CHILD_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise ChildError(last_line(done.stderr))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def command(peers: Peers, mode: str, name: str, folder: Path, *args: str) -> list[str]:
    """Return the command of a child whose recorder writes into `folder`/data."""
    module = "benchmarks.recording_child"
    return [str(peers.python), "-m", module, mode, name, str(folder / "data"), *args]


@contextmanager
def data_folder() -> Iterator[Path]:
    """Give a temporary folder with the empty folder `data` in it."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "data").mkdir()
        yield Path(name)


def measure_speed(peers: Peers, name: str, plan: Plan) -> dict[str, Any]:
    """Log as fast as it can in a fresh process and folder; read back what was stored."""
    with data_folder() as folder:
        found = child(peers, folder, "speed", name, str(plan.steps(name)))
        if name != NOTHING:
            found["stored"] = child(peers, folder, "count", name)["steps"]
    return found


def measure_kill(peers: Peers, name: str) -> dict[str, Any]:
    """Kill the recorder while it logs; return steps logged and lost."""
    with data_folder() as folder:
        note = folder / "logged"
        note.write_bytes(bytes(8))
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command(peers, "paced", name, folder, str(note)),
                cwd=folder,
                env=environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        with note.open("r+b") as file, mmap.mmap(file.fileno(), 8) as logged:
            try:
                lived_s = _live(process, logged)
            except ChildError as error:
                said = last_line((folder / "output").read_text(errors="replace"))
                raise ChildError(f"{error}: {said}") from error
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
            steps = _number(logged)
        _let_survivors_end()
        read = child(peers, folder, "count", name)["steps"]
    lost = max(0, steps - read)
    return {"logged": steps, "lost": lost, "lost_s": lost * lived_s / max(1, steps)}


def summary(
    speeds: Sequence[dict[str, Any]], kills: Sequence[dict[str, Any]], empty: bool
) -> dict[str, Any]:
    """Return the medians of a recorder's rounds, and the worst of its kills.

    With `empty`, the bytes of the empty store are left out: fewer steps do not make up for them.
    """

    def middle(name: str) -> float:
        return statistics.median(float(found[name]) for found in speeds)

    steps = speeds[0]["steps"]
    points = steps * len(METRICS)
    size = middle("bytes") - (middle("empty_bytes") if empty else 0)
    return {
        "steps": steps,
        "median_us": middle("median_us"),
        "median_us_by_round": [found["median_us"] for found in speeds],
        "p99_us": middle("p99_us"),
        "p99_us_by_round": [found["p99_us"] for found in speeds],
        "max_us": max(found["max_us"] for found in speeds),
        "cpu_s_per_100k": middle("cpu_s") * 1e5 / steps,
        "finish_s": middle("finish_s"),
        "bytes_per_point": size / points,
        "live_bytes": middle("live_bytes"),
        "not_stored": max(steps - found["stored"] for found in speeds),
        "kills": len(kills),
        "lost_on_kill": max((found["lost"] for found in kills), default=None),
        "lost_on_kill_s": max((found["lost_s"] for found in kills), default=None),
        "logged_before_kill": [found["logged"] for found in kills],
    }


def measure(peers: Peers, plan: Plan) -> dict[str, Any]:
    """Measure all recorders in interleaved rounds; return the report's values."""
    names = [NOTHING, OURS, *peers.versions]
    speeds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    kills: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number in range(max(plan.rounds, plan.our_kills)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if name in failed:
                continue
            try:
                if number < plan.rounds:
                    speeds[name].append(measure_speed(peers, name, plan))
                    say(f"round {number + 1}: {name} {_brief(speeds[name][-1])}")
                if number < plan.kills_of(name):
                    kills[name].append(measure_kill(peers, name))
                    say(f"kill {number + 1}: {name} {kills[name][-1]}")
            except ChildError as error:
                failed[name] = str(error)
                say(f"{name} failed: {error}")
    calls = speeds.pop(NOTHING)
    found = {
        name: summary(rounds, kills[name], name in FEWER)
        for name, rounds in speeds.items()
        if rounds
    }
    return {
        "versions": peers.versions,
        "missing": peers.missing,
        "failed": failed,
        "empty_call_us": statistics.median(one["median_us"] for one in calls),
        "recorders": found,
        "targets": targets(found.get(OURS, {})),
    }


def targets(ours: dict[str, Any]) -> dict[str, Any]:
    """Hold our values against what is promised."""
    return {
        "median_us": at_most(ours.get("median_us"), MEDIAN_US),
        "p99_us": at_most(ours.get("p99_us"), P99_US),
        "cpu_s_per_100k": at_most(ours.get("cpu_s_per_100k"), CPU_S),
        "bytes_per_point": at_most(ours.get("bytes_per_point"), POINT_BYTES),
        "not_stored": at_most(ours.get("not_stored"), 0),
        "lost_on_kill": at_most(ours.get("lost_on_kill"), 0),
    }


def _live(process: subprocess.Popen[bytes], logged: mmap.mmap) -> float:
    """Wait for the first step, then as long again as is measured; return the seconds lived."""
    deadline = time.monotonic() + STARTED_S
    while not _number(logged):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ChildError("logged nothing")
        time.sleep(0.01)
    # The kill falls anywhere between two flushes.
    lived_s = LIVED_S + random.random()
    time.sleep(lived_s)
    if process.poll() is not None:
        raise ChildError("ended by itself")
    return lived_s


def _number(logged: mmap.mmap) -> int:
    return memoryview(logged[:8]).cast("q")[0]


def _let_survivors_end() -> None:
    """Give processes that the killed one had started some time, then end them too."""
    survivors = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(survivors, timeout=SURVIVORS_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=SURVIVORS_S)


def _brief(found: dict[str, Any]) -> str:
    return (
        f"{found['median_us']:.2f} µs, p99 {found['p99_us']:.1f}, "
        f"{found['cpu_s'] * 1e5 / found['steps']:.2f} s CPU per 10^5"
    )


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of about a minute")
    parser.add_argument("--no-peers", action="store_true", help="Stepscope alone")
    parser.add_argument("--rounds", type=int, default=Plan().rounds)
    parser.add_argument("--wait-quiet", type=float, default=0, metavar="SECONDS")
    args = parser.parse_args()
    quick = Plan(rounds=1, kills=1, our_kills=2, share=0.2)
    plan = quick if args.quick else Plan(rounds=args.rounds)
    peers = without("left out (--no-peers)") if args.no_peers else prepare()
    adopt_orphans()
    report.wait_for_quiet(args.wait_quiet)
    load = os.getloadavg()[0]
    options = {"quick": args.quick, "peers": not args.no_peers, "rounds": plan.rounds}
    report.report("recorder", options, load, measure(peers, plan))


if __name__ == "__main__":
    main()
