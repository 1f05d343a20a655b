"""A trial of a script: `stepscope watch` in a separate process, and what it must not change."""

from __future__ import annotations

import contextlib
import os
import site
import subprocess
import tempfile
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec

from stepscope.common.files import read_tail
from stepscope.common.formatting import terminal_text
from stepscope.gpu.source import is_simulated
from stepscope.lab.command import UsageError
from stepscope.lab.folder import LAB
from stepscope.lab.measurement import RunTooShortError, measured
from stepscope.lab.revision import RevisionError, moved, repository, unpack
from stepscope.lab.script_plan import (
    ARGUMENTS,
    ENV,
    OUT,
    REV,
    SEED,
    ScriptCommand,
    sha256_of,
    words_of,
)
from stepscope.lab.trial_process import MAX_LOG_BYTES
from stepscope.run import RunError, RunInfo, RunStatus, rank_file, read_run, run_folders, runs_root
from stepscope.run.rank_info import find_rank
from stepscope.store import StoreError
from stepscope.watch.trial import TRIAL, TrialPlan

MAX_FILES = 100_000  # of each folder, about 0.3 s before and after a trial
NO_UPLOAD = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "STEPSCOPE_GIT": "0",  # else git runs during the measured steps
    "PYTHONDONTWRITEBYTECODE": "1",  # no new __pycache__ in the script's folder
}
SIMULATED = "The script trains on a simulated GPU, whose times are not those of a GPU."
Files = set[tuple[str, int, int]]
"""Path, modification time in nanoseconds, and size of each file."""


def run_trial(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the job; return `metrics` and `machine`, or a `reason`.

    A job has `script`, `changes`, `seed`, `warmup`, `steps`, an empty `folder`, and may have
    `probe`: settings whose entries only show which apply. The result has `stops` if no trial
    of this sweep can be measured.
    """
    script = msgspec.convert(job["script"], ScriptCommand)
    folder = Path(job["folder"])
    try:
        if not script.is_module and sha256_of(Path(script.cwd, script.target)) != script.sha256:
            return {"reason": f"{script.target} was edited during the sweep.", "stops": True}
        before = _files(script, folder.parent)
        code = _run(script, job, folder)
        changed = before ^ _files(script, folder.parent)
        if changed:
            path, *_ = min(changed)
            return {"reason": _touched(path), "stops": True}
        return _result(folder, code, job, script.nproc_per_node or 1)
    except UsageError as error:
        return {"reason": str(error), "stops": True}
    except RevisionError as error:
        return {"reason": str(error)}
    except OSError as error:
        return {"reason": f"The script cannot be started: {error}.", "stops": True}


def _files(script: ScriptCommand, sweep: Path) -> Files:
    """Return the files of each folder of a script, without this sweep, other sweeps and runs."""
    root = runs_root().resolve()
    without = {sweep.resolve(), root / LAB, *run_folders(root)}  # other runs may be live
    return set().union(*(files(of, without) for of in script.folders))


def _touched(path: str) -> str:
    return (
        f"The file {path} changed during a trial, and later trials would find it. If the script "
        f"writes it, make it write inside {OUT} (--output {OUT}): each trial has its own folder. "
        "If another program writes it, end that program for the time of the sweep."
    )


def _run(script: ScriptCommand, job: Mapping[str, Any], folder: Path) -> int:
    """Return the exit code of the script under `stepscope watch`. Raises OSError, RevisionError."""
    out = folder / "out"
    out.mkdir()
    changes = job["changes"]
    words = [
        word.replace(OUT, str(out)).replace(SEED, str(job["seed"]))
        for word in (*script.arguments, *changes.get(ARGUMENTS, []))
    ]
    plan = TrialPlan(
        warmup=job["warmup"],
        steps=job["steps"],
        probe="probe" in job,
        ranks=script.nproc_per_node or 1,
    )
    cwd, target = script.cwd, script.target
    if REV in changes:
        top, tree = repository(Path(cwd)), folder / "tree"
        unpack(changes[REV], top, tree, script.links)
        plan = msgspec.structs.replace(plan, repository=str(top), tree=str(tree))
        cwd = str(moved(Path(cwd), top, tree))
        if not script.is_module:
            file = moved(Path(script.cwd, target), top, tree)
            target = str(file) if os.path.isabs(target) else target
    module = ["-m"] if script.is_module else []
    watch = ["-m", "stepscope.watch", "--runs", str(folder / "runs"), "--name", "trial"]
    if settings := job.get("probe") or words_of(changes):
        watch += ["--with", " ".join(settings)]
    if script.nproc_per_node is not None:
        torchrun = ["-P", "-m", "stepscope.lab.torchrun", "--nproc-per-node"]
        watch = [*torchrun, str(script.nproc_per_node), *watch]
    return subprocess.call(
        [script.python, *watch, *module, target, *words],
        cwd=cwd,
        env=_environment(job, plan),
        stdin=subprocess.DEVNULL,
    )


def _environment(job: Mapping[str, Any], plan: TrialPlan) -> dict[str, str]:
    """Return the environment of a trial."""
    changes = job["changes"]
    # torch.compile's cache is shared; without this name it is in TMPDIR, a folder of the trial.
    cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    environment = {"TORCHINDUCTOR_CACHE_DIR": cache, **os.environ, **NO_UPLOAD}
    environment |= {"TMPDIR": job["temporary"], TRIAL: msgspec.json.encode(plan).decode()}
    # The parent process has put the folder of this package first; a variant may have other ones.
    own, *given = os.environ["PYTHONPATH"].split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(given)
    environment |= {
        name.removeprefix(ENV): value for name, value in changes.items() if name.startswith(ENV)
    }
    if own not in (*site.getsitepackages(), site.getusersitepackages()):
        folders = filter(None, (environment["PYTHONPATH"], own))
        environment["PYTHONPATH"] = os.pathsep.join(folders)
    return environment


def _result(folder: Path, code: int, job: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    run_folder = next(run_folders(folder / "runs"), None)
    if run_folder is None:
        # The last line of the log, which the sweep reads, has the reason.
        raise SystemExit(code or 1)
    try:
        ended = read_run(run_folder)
        found = [find_rank(run_folder, number) for number in range(ranks)]
        files = [{} if rank is None else rank.run_json for rank in found]
        trials: list[Any] = [one.get("trial") for one in files]
        for number, trial in enumerate(trials):
            if trial is not None and trial["refused"] is not None:
                reason = of_rank(number, ranks, trial["refused"])
                return {"reason": reason, "stops": trial["stops"]}
        if None in trials:
            missing = trials.index(None)
            return {"reason": of_rank(missing, ranks, _early(ended, code, job, missing))}
        if is_simulated(str(ended.run_json.get("device"))):
            return {"reason": SIMULATED, "stops": True}
        state = "applies" if "probe" in job else "in effect"
        settings = on_all_ranks([one.get("settings") or [] for one in files], state)
        refused = next((one for one in settings if one["state"] != "in effect"), None)
        if refused is not None and "probe" not in job:
            reason = f"{refused['name']} {refused['state']}: {refused['text']}"
            return {"reason": reason, "settings": settings}
        metrics = measured(run_folder, int(job["warmup"]), ranks)
    except (RunTooShortError, RunError, StoreError) as error:
        return {"reason": str(error)}
    machine = {**(ended.run_json.get("environment") or {}), "rate": metrics.pop("rate_unit")}
    return {"metrics": metrics, "machine": machine, "settings": settings}


def of_rank(number: int, ranks: int, text: str) -> str:
    """Return a sentence about a rank, which it names unless there is only one."""
    return text if ranks == 1 else f"Rank {number}: {text}"


def on_all_ranks(ranks: Sequence[Sequence[Mapping[str, Any]]], state: str) -> list[dict[str, Any]]:
    """Return each setting as the first rank without this state has it, otherwise as rank 0."""
    settings = []
    for entries in zip(*ranks, strict=True):
        others = [number for number, one in enumerate(entries) if one["state"] != state]
        entry = dict(entries[others[0] if others else 0])
        if others:
            entry["text"] = of_rank(others[0], len(ranks), entry["text"])
        settings.append(entry)
    return settings


def _early(ended: RunInfo, code: int, job: Mapping[str, Any], number: int) -> str:
    """Return why a rank of a script has ended before the last step of its trial."""
    if ended.status is not RunStatus.FINISHED:
        reason = ended.reason or f"The script ended with exit code {code}."
        last = _last_line(ended.folder / rank_file("output.log", ended.cause))
        return (reason if last in reason else f"{reason} {last}")[:400]
    own = find_rank(ended.folder, number)
    if own is None or own.run_json.get("reason") is not None:  # no step was seen
        return own.run_json["reason"] if own else "It was not recorded."
    return (
        f"The script ended after {own.run_json.get('step')} of {job['warmup'] + job['steps'] + 1} "
        "steps. Train longer, or give fewer steps (--steps, --warmup)."
    )


def _last_line(log: Path) -> str:
    """Return the last line of a log that is not Stepscope's, or an empty text."""
    try:
        lines = terminal_text(read_tail(log, MAX_LOG_BYTES)).split("\n")
    except OSError:
        return ""
    own = "stepscope: "
    return next((one for one in reversed(lines) if one.strip() and not one.startswith(own)), "")


def files(root: Path, without: Set[Path]) -> Files:
    """Return up to MAX_FILES visible files outside of `without`."""
    found: Files = set()
    for folder, folders, names in os.walk(root):
        for name in sorted(names):
            with contextlib.suppress(OSError):  # removed meanwhile
                path = os.path.join(folder, name)
                state = os.lstat(path)
                found.add((path, state.st_mtime_ns, state.st_size))
            if len(found) >= MAX_FILES:
                return found
        visible = (name for name in folders if not name.startswith(".") and name != "__pycache__")
        folders[:] = sorted(name for name in visible if Path(folder, name) not in without)
    return found
