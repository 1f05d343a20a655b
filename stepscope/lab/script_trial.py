"""A trial of a script: `stepscope watch` in a separate process, and what it must not change."""

from __future__ import annotations

import contextlib
import json
import os
import re
import site
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
import psutil

from stepscope.common.files import read_tail
from stepscope.common.formatting import terminal_text
from stepscope.distributed import ranks_text
from stepscope.gpu.source import is_simulated
from stepscope.host.child_process import kill_until_none
from stepscope.host.process_limits import adopt_orphans
from stepscope.lab.command import UsageError
from stepscope.lab.folder import LAB, write_json
from stepscope.lab.measurement import RunTooShortError, Steps, measured
from stepscope.lab.revision import RevisionError, moved, repository, unpack
from stepscope.lab.script_plan import (
    ARGUMENTS,
    ENV,
    OUT,
    PYTHON,
    REV,
    SEED,
    ScriptCommand,
    sha256_of,
    with_arguments,
    words_of,
)
from stepscope.lab.trial_process import KILL_TIMEOUT_S, LOG, MAX_LOG_BYTES
from stepscope.recorded_run import open_run
from stepscope.run import RunError, RunInfo, RunStatus, rank_file, read_run, run_folders, runs_root
from stepscope.run.rank_info import find_rank
from stepscope.run.rank_status import RankState, rank_states
from stepscope.store import StoreError
from stepscope.watch.trial import LAST_STEP_S, TRIAL, UNEVEN

MAX_FILES = 100_000
"""Files whose changes are looked for, of each folder: about 0.3 s before and after a trial."""
NO_UPLOAD = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "STEPSCOPE_GIT": "0",  # else git runs during the measured steps
    "PYTHONDONTWRITEBYTECODE": "1",  # no new __pycache__ in the script's folder
}
MODULES = "modules.json"
MIN_SCRIPT_STEPS = 80  # of a whole script, for a warm-up of 10 and 30 measured steps
SIMULATED = "The script trains on a simulated GPU, whose times are not those of a GPU."
UNEVEN_STEPS = (
    f"{LAST_STEP_S:.0f} s after that of another rank. All ranks must make the same number of "
    "optimizer steps."
)
NEW_SWEEP = {"stops": True, "new_sweep": True}
Files = dict[str, tuple[int, int]]


def run_trial(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the job; return `metrics` and `machine`, or a `reason`.

    A job has `script`, `changes`, `seed`, `warmup`, `steps`, `seconds`, an empty `folder`, and may
    have `probe`: settings whose entries only show which apply. The result has `stops` if no trial
    of this sweep can be measured, and `new_sweep` if resuming cannot help.
    """
    script = msgspec.convert(job["script"], ScriptCommand)
    folder, out = Path(job["folder"]), Path(job["folder"], "out")
    try:
        out.mkdir()
        if (reason := _edited(script, folder.parent)) is not None:
            return {"reason": reason, **NEW_SWEEP}
        before = _files(script, folder.parent)
        adopt_orphans()
        others = set(psutil.Process().children())
        try:
            code = _run(script, job, folder, out)
        finally:
            # All that the script has started, whatever its session and environment.
            kill_until_none(
                lambda: {*psutil.Process().children(recursive=True)} - others, KILL_TIMEOUT_S
            )
        after = _files(script, folder.parent)
        pairs = zip(before, after, strict=True)
        changed = sorted({path for old, new in pairs for path, _ in old.items() ^ new.items()})
        if changed and next(run_folders(folder / "runs"), None) is None:
            return {"reason": _touched(changed[0]), **NEW_SWEEP}
        result = _result(folder, code, job, script.nproc_per_node or 1)
        if changed:
            why = f"{_touched(changed[0])} {result.get('reason', '')}".strip()
            return {"reason": why, **NEW_SWEEP}
        _keep_hashes(script, folder.parent, result.pop("modules", ()))
        return result
    except RevisionError as error:
        return {"reason": str(error)}
    except OSError as error:
        return {"reason": f"The script cannot be started: {error}.", "stops": True}


def _edited(script: ScriptCommand, sweep: Path) -> str | None:
    """Return why the script or a module of it is not that of the sweep any more, or None."""
    own = {} if script.is_module else {script.target: str(script.sha256)}
    for path, known in (own | _hashes(sweep)).items():
        try:
            if sha256_of(Path(script.cwd, path)) != known:
                return f"{path} was edited during the sweep."
        except UsageError as error:
            return str(error)
    return None


def _hashes(sweep: Path) -> dict[str, str]:
    """Return the hash of each module of the script that a trial has loaded. Raises OSError."""
    try:
        return msgspec.json.decode((sweep / MODULES).read_bytes(), type=dict[str, str])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def _keep_hashes(script: ScriptCommand, sweep: Path, modules: Iterable[str]) -> None:
    """Add modules of the script's folders, except installed ones and those of a revision."""
    known = _hashes(sweep)
    for path in modules:
        file = Path(path).resolve()
        is_own = any(map(file.is_relative_to, script.folders)) and "site-packages" not in path
        is_code = file.suffix == ".py" and file.is_file()
        if is_own and is_code and not file.is_relative_to(sweep.resolve()):
            known.setdefault(path, sha256_of(file))
    write_json(sweep / MODULES, known)


def _files(script: ScriptCommand, sweep: Path) -> list[Files]:
    """Return the files of each folder of a script, without this sweep, other sweeps and runs."""
    root = runs_root().resolve()
    without = {sweep.resolve(), root / LAB, *run_folders(root)}  # other runs may be live
    return [files(of, without) for of in script.folders]


def _touched(path: str) -> str:
    return (
        f"The file {path} changed during a trial, and later trials would find it. If the script "
        f"writes it, make it write inside {OUT} (--output {OUT}): each trial has its own folder. "
        "If another program writes it, end that program for the time of the sweep."
    )


def _run(script: ScriptCommand, job: Mapping[str, Any], folder: Path, out: Path) -> int:
    """Return the exit code of the script under `stepscope watch`. Raises OSError, RevisionError."""
    changes = job["changes"]
    words = with_arguments(script.arguments, changes.get(ARGUMENTS, []))
    words = [word.replace(OUT, str(out)).replace(SEED, str(job["seed"])) for word in words]
    limits = {name: job[name] for name in ("warmup", "steps", "seconds")}
    limits |= {"probe": "probe" in job, "ranks": script.nproc_per_node or 1}
    cwd, target = script.cwd, script.target
    if REV in changes:
        top, tree = repository(Path(cwd)), folder / "tree"
        unpack(changes[REV], top, tree, script.links)
        limits |= {"repository": str(top), "tree": str(tree)}
        cwd = str(moved(Path(cwd), top, tree))
        if not script.is_module:
            file = moved(Path(script.cwd, target), top, tree)
            target = str(file) if os.path.isabs(target) else target
    environment = {**os.environ, **NO_UPLOAD, TRIAL: json.dumps(limits)}
    if "temporary" in job:
        user = f"torchinductor_{os.environ.get('USER', os.getuid())}"
        # Compiled once, not in each trial.
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), user))
        environment["TMPDIR"] = job["temporary"]
    environment |= {
        name.removeprefix(ENV): value for name, value in changes.items() if name.startswith(ENV)
    }
    # The parent process has put the folder of this package first; a variant may have other ones.
    own, *given = os.environ["PYTHONPATH"].split(os.pathsep)
    if ENV + "PYTHONPATH" in changes:
        given = environment["PYTHONPATH"].split(os.pathsep)
        folders = [os.path.realpath(Path(cwd, one)) for one in given if one]
        environment[TRIAL] = json.dumps(limits | {"folders": folders})
    if own not in (*site.getsitepackages(), site.getusersitepackages()):
        given.append(own)
    environment["PYTHONPATH"] = os.pathsep.join(given)
    module = ["-m"] if script.is_module else []
    watch = ["-m", "stepscope.watch", "--runs", str(folder / "runs"), "--name", "trial"]
    if settings := job.get("probe") or words_of(changes):
        watch += ["--with", " ".join(settings)]
    if script.nproc_per_node is not None:
        torchrun = ["-P", "-m", "stepscope.lab.torchrun", "--nproc-per-node"]
        watch = [*torchrun, str(script.nproc_per_node), *watch]
    return subprocess.call(
        [changes.get(PYTHON, script.python), *watch, *module, target, *words],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


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
                return {"reason": reason, **(NEW_SWEEP if trial["stops"] else {})}
        if (run_folder / UNEVEN).exists():
            others = ranks_text([number for number, one in enumerate(trials) if one is None])
            return {"reason": f"No last step of {others} {UNEVEN_STEPS}"}
        # A whole script shorter than the first trial shows how many steps a trial can have.
        is_whole = [ended.status, job["steps"], ranks] == [RunStatus.FINISHED, 0, 1]
        if None in trials and not (is_whole and _steps_of(ended, 0) >= MIN_SCRIPT_STEPS):
            return {"reason": _early(ended, code, job, trials.index(None), ranks)}
        if is_simulated(str(ended.run_json.get("device"))):
            return {"reason": SIMULATED, **NEW_SWEEP}
        state = "applies" if "probe" in job else "in effect"
        settings = on_all_ranks([one.get("settings") or [] for one in files], state)
        for one in settings:
            if one["state"] != "in effect" and "probe" not in job:
                reason = f"{one['name']} {one['state']}: {one['text']}"
                return {"reason": reason, "settings": settings}
        metrics = measured(run_folder, int(job["warmup"]), ranks)
        if None in trials:
            metrics["script_steps"] = _steps_of(ended, 0)
    except (RunTooShortError, RunError, StoreError) as error:
        return {"reason": str(error)}
    machine = {**(ended.run_json.get("environment") or {}), "rate": metrics.pop("rate_unit")}
    if PYTHON in job["changes"]:
        machine.pop("torch", None)  # may be another version
    modules = {path for trial in trials if trial is not None for path in trial["modules"]}
    return {"metrics": metrics, "machine": machine, "settings": settings, "modules": modules}


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


def _early(ended: RunInfo, code: int, job: Mapping[str, Any], number: int, ranks: int) -> str:
    """Return why a rank of a script has ended before the last step of its trial."""
    if ended.status is not RunStatus.FINISHED:
        reason, cause, rank = ended.reason, ended.cause, ended.cause_rank
        if sum(one.state is RankState.DEAD for one in rank_states(ended.folder)) > 1:
            named = _last_line(Path(job["folder"]).parent / LOG)  # torchrun knows the first one
            if (found := re.match(r"Rank (\d+) ended ", named)) is not None:
                reason, cause, rank = named, int(found[1]), int(found[1])
        reason = reason or f"The script ended with exit code {code}."
        last = _last_line(ended.folder / rank_file("output.log", cause))
        last = last.removeprefix(f"[rank{rank}]: ")
        return (reason if last in reason else f"{reason} {last}")[:400]
    own = find_rank(ended.folder, number)
    if own is None or own.run_json.get("reason") is not None:  # no step was seen
        return of_rank(number, ranks, own.run_json["reason"] if own else "It was not recorded.")
    count = _steps_of(ended, number)
    measured_s = f"{job['seconds']:g} s were measured"
    wanted = f"{job['warmup'] + job['steps'] + 1} steps" if job["steps"] else measured_s
    text = f"The script ended after {count} steps, before {wanted}. Train longer, or give fewer "
    return of_rank(number, ranks, f"{text}steps (--steps, --warmup).")


def _steps_of(ended: RunInfo, number: int) -> int:
    try:
        return len(Steps(open_run(ended.folder, rank=number), 0).seconds) + 1
    except RunTooShortError:
        return 1


def _last_line(log: Path) -> str:
    """Return the last line of a log that is not Stepscope's, or an empty text."""
    try:
        lines = terminal_text(read_tail(log, MAX_LOG_BYTES)).split("\n")
    except OSError:
        return ""
    own = "stepscope: "
    return next((one for one in reversed(lines) if one.strip() and not one.startswith(own)), "")


def files(root: Path, without: Set[Path]) -> Files:
    """Return modification time and size of up to MAX_FILES visible files outside of `without`."""
    found: Files = {}
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for path in (os.path.join(folder, name) for name in sorted(names + links)):
            with contextlib.suppress(OSError):  # removed meanwhile
                state = os.lstat(path)
                found[path] = (state.st_mtime_ns, state.st_size)
            if len(found) >= MAX_FILES:
                return found
        visible = (name for name in folders if not name.startswith(".") and name != "__pycache__")
        folders[:] = sorted(name for name in visible if Path(folder, name) not in without)
    return found
