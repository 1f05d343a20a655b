"""A trial of `stepscope lab`: end a watched script after a number of steps.

The process ends by `os._exit` at a step boundary, after its run is closed: neither signal handlers
nor `finally` blocks nor atexit functions of the script run, which may save or upload.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stepscope.distributed import rank_and_size
from stepscope.host.process_limits import set_parent_death_signal
from stepscope.run.rank_info import find_rank
from stepscope.watch.hooks.patching import PostImportHook

if TYPE_CHECKING:
    from stepscope.watch.watched_run import WatchedRun

POLL_S = 0.002
TRIAL = "STEPSCOPE_TRIAL"
"""Environment variable: JSON with the numbers of `warmup` steps and of measured `steps`.

Those of a trial of another revision have the `repository`, from which no module may be loaded, and
the `tree` into which the revision was unpacked. With `probe`, settings are not applied: the run
records which ones apply. `ranks` is the number of ranks, and `parent` the pid of their torchrun.
"""


class TrialLimit:
    """Ends the process of a run after the steps of its trial, or if it cannot be measured."""

    def __init__(
        self,
        run: WatchedRun,
        *,
        warmup: int,
        steps: int,
        repository: str | None = None,
        tree: str = "",
        probe: bool = False,
        ranks: int = 1,
        parent: int | None = None,
    ) -> None:
        assert run.session is not None
        if probe and run.hooks is not None and run.hooks.applied is not None:
            for setting in run.hooks.applied.settings:
                setting.is_probe = True
        self._run = run
        self._session = run.session
        self._folder = run.session.recorder.folder
        # The first step has no duration.
        self._last_step = warmup + steps + 1
        self._repository = repository
        self._tree = tree
        self._ranks = ranks
        self._parent = parent
        self._pid = os.getpid()

    def at_boundary(self) -> None:
        """End the process after its last step. Training thread only."""
        if self._session.world_size != self._ranks:
            self._end(
                "The script starts several ranks itself. Let torchrun start them: "
                "--nproc-per-node N."
            )
        if self._session.recorder.step >= self._last_step:
            self._end()

    def install(self) -> None:
        """Count the steps, and refuse to overwrite a checkpoint."""
        set_parent_death_signal()
        is_rank = self._parent is not None and self._session.world_size == self._ranks
        if is_rank and os.getppid() != self._parent:  # torchrun has ended before that
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
        if os.getpid() == self._pid:  # else a forked child, which has no run
            if refused is None and self._ranks > 1 and rank_and_size() is None:
                refused = (
                    "The script does not call torch.distributed.init_process_group, so each rank "
                    "trains alone. Call it, or omit --nproc-per-node."
                )
            if refused is None and self._repository is not None:
                refused = _foreign_module(self._repository, self._tree)
            self._session.recorder.describe(trial={"refused": refused, "stops": stops})
            self._run.close()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the script
                stream.flush()
        if os.getpid() == self._pid and self._parent is not None:
            if refused is not None:
                os.kill(self._parent, signal.SIGKILL)  # the ranks die with torchrun
            for number in range(self._ranks):  # the last step of each may need this process
                while (rank := find_rank(self._folder, number)) is not None and rank.status.live:
                    time.sleep(POLL_S)
        os._exit(0)


def _modules() -> Iterator[tuple[str, str]]:
    """Yield the name and the absolute path of each module that was loaded from a file."""
    for name, module in sys.modules.copy().items():
        # Not by getattr(), which makes lazy modules import others.
        path = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(path, str) and os.path.isabs(path):
            yield name, path


def _foreign_module(repository: str, tree: str) -> str | None:
    """Return why the modules are not those of the revision in `tree`, or None.

    The repository may contain the tree and an environment, whose modules are expected. Modules
    below a link of the tree are expected too: the link was asked for.
    """
    top = os.path.realpath(repository)
    # A prefix that contains the repository (/usr and /usr/src/app) does not make it an environment.
    own = [os.path.realpath(one) for one in (tree, sys.prefix, sys.base_prefix)]
    own = [one for one in own if one != top and _is_in(one, top)]
    for name, path in sorted(_modules()):
        if _is_in(path, tree):
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
    limit = TrialLimit(run, **json.loads(text))
    if trouble is not None:
        limit._end(f"The steps of the script cannot be counted: {trouble}")
    limit.install()
