"""A trial of `stepscope lab`: end a watched script after a number of steps.

The process ends by `os._exit` at a step boundary, after its run is closed: neither signal handlers
nor `finally` blocks nor atexit functions of the script run, which may save or upload.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from stepscope.distributed import rank_and_size
from stepscope.host.child_process import set_parent_death_signal
from stepscope.run.rank_info import find_rank
from stepscope.watch.hooks.patching import PostImportHook
from stepscope.watch.script import exit_without_handlers

if TYPE_CHECKING:
    from stepscope.watch.watched_run import WatchedRun

POLL_S = 0.002
TRIAL = "STEPSCOPE_TRIAL"  # Environment variable: a TrialPlan as JSON.


class TrialPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a trial, and what it runs.

    A trial of another revision has the `repository`, from which no module may be loaded, and the
    `tree` into which the revision was unpacked. With `probe`, settings are not applied: the run
    records which ones apply. `parent` is the pid of the torchrun of several `ranks`.
    """

    warmup: int
    steps: int
    repository: str | None = None
    tree: str = ""
    probe: bool = False
    ranks: int = 1
    parent: int | None = None


class TrialLimit:
    """Ends the process of a run after the steps of its trial, or if it cannot be measured."""

    def __init__(self, run: WatchedRun, plan: TrialPlan) -> None:
        assert run.session is not None
        if plan.probe and run.hooks is not None and run.hooks.applied is not None:
            for setting in run.hooks.applied.settings:
                setting.is_probe = True
        self._plan = plan
        self._run = run
        self._session = run.session
        self._folder = run.session.recorder.folder
        self._pid = os.getpid()

    def at_boundary(self) -> None:
        """End the process after its last step. Training thread only."""
        plan = self._plan
        if self._session.world_size != plan.ranks:
            self._end(
                "The script starts several ranks itself. Let torchrun start them: "
                "--nproc-per-node N."
            )
        # The first step has no duration.
        if self._session.recorder.step > plan.warmup + plan.steps:
            self._end()

    def install(self) -> None:
        """Count the steps, and refuse to overwrite a checkpoint."""
        set_parent_death_signal()
        parent = self._plan.parent
        is_rank = parent is not None and self._session.world_size == self._plan.ranks
        if is_rank and os.getppid() != parent:  # torchrun has ended before that
            os._exit(1)
        self._session.at_boundary = self.at_boundary
        # Not torch itself: the hooks of the run wait for that, and a module has one hook.
        PostImportHook("torch.serialization", self._protect_files).start()

    def _protect_files(self, module: Any) -> None:
        save, own = module.save, [self._folder.parents[1], Path(tempfile.gettempdir()).resolve()]

        @functools.wraps(save)
        def saving(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(f, str | os.PathLike):
                path = Path(os.path.realpath(f))
                if path.is_file() and not any(path.is_relative_to(one) for one in own):
                    self._end(
                        f"The script would overwrite {f} (torch.save). Make it write inside "
                        "{out} (--output {out}): each trial has its own folder.",
                        stops=True,
                    )
            return save(obj, f, *args, **kwargs)

        module.save = saving  # before torch/__init__.py takes it from this module

    def _end(self, refused: str | None = None, *, stops: bool = False) -> NoReturn:
        plan = self._plan
        if os.getpid() == self._pid:  # else a forked child, which has no run
            if refused is None and plan.ranks > 1 and rank_and_size() is None:
                refused = (
                    "The script does not call torch.distributed.init_process_group, so each rank "
                    "trains alone. Call it, or omit --nproc-per-node."
                )
            if refused is None and plan.repository is not None:
                refused = _foreign_module(plan.repository, plan.tree)
            self._session.recorder.describe(trial={"refused": refused, "stops": stops})
            self._run.close()
        if os.getpid() == self._pid and plan.parent is not None:
            if refused is not None:
                os.kill(plan.parent, signal.SIGKILL)  # the ranks die with torchrun
            for number in range(plan.ranks):  # the last step of each may need this process
                while (rank := find_rank(self._folder, number)) is not None and rank.status.live:
                    time.sleep(POLL_S)
        exit_without_handlers(0)


def _foreign_module(repository: str, tree: str) -> str | None:
    """Return why the modules are not those of the revision in `tree`, or None.

    The repository may contain the tree and an environment, whose modules are expected. Modules
    below a link of the tree are expected too: the link was asked for.
    """
    top = os.path.realpath(repository)
    # A prefix that contains the repository (/usr and /usr/src/app) does not make it an environment.
    own = [os.path.realpath(one) for one in (tree, sys.prefix, sys.base_prefix)]
    own = [one for one in own if one != top and _is_in(one, top)]
    for name, module in sorted(sys.modules.items()):
        # Not by getattr(), which makes lazy modules import others.
        path = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(path, str) or not os.path.isabs(path) or _is_in(path, tree):
            continue
        file = os.path.realpath(path)
        is_installed = f"{os.sep}site-packages{os.sep}" in file
        if _is_in(file, top) and not is_installed and not any(_is_in(file, one) for one in own):
            return (
                f"The module {name} was loaded from {file}, not from the revision (an editable "
                "install, or an absolute folder on PYTHONPATH). Add env:PYTHONPATH=FOLDER to the "
                "variant: a folder relative to the current one is that of the revision."
            )
    return None


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def begin_trial(run: WatchedRun, trouble: str | None = None) -> None:
    """Limit a run to the steps of its trial, if this process belongs to one.

    A run without a session or with `trouble` counts no steps: the process ends.
    """
    if not (text := os.environ.get(TRIAL)):
        return
    if run.session is None:
        sys.stderr.flush()  # its last line has the reason
        os._exit(1)
    limit = TrialLimit(run, msgspec.json.decode(text, type=TrialPlan))
    if trouble is not None:
        limit._end(f"The steps of the script cannot be counted: {trouble}")
    limit.install()
