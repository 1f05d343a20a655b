"""`stepscope.init()`: record the training of a script by explicit calls.

Each `step` is one optimizer step: a row, and a step boundary at which the page's commands take
effect. Never waits for a GPU.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stepscope.common.json_values import to_json, to_text
from stepscope.common.secrets import with_hidden_secrets
from stepscope.distributed.rendezvous import announce, find_place
from stepscope.host.environment import in_notebook, running_folder, running_name
from stepscope.profiling.phase_ranges import DATA, span
from stepscope.run import RunKind, RunStatus, runs_root
from stepscope.run.status import outcome
from stepscope.session.script_session import ScriptSession
from stepscope.session.stop import handlers_wait
from stepscope.store.blocks import RATES, SAMPLES, STEP_TIME, STEPS
from stepscope.store.recorder import MAX_NAME_CHARS, Recorder
from stepscope.store.ring import WIDTH, RowLayout

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")

DATA_WAIT = "perf/data_wait"

_current: Tracker | None = None


class Tracker:
    """Records the steps of one script; created by `init`, or by `stepscope watch`.

    Without a `session` every call does nothing. Under `stepscope watch` (`watched`) the hooks count
    the steps of the optimizers: then `step` adds values to the last step of the optimizer, and
    counts steps only in a script without optimizers of torch. Only Stop on the page raises into the
    training (Ctrl-C).
    """

    def __init__(self, session: ScriptSession | None, *, watched: bool = False) -> None:
        self.session = session
        self.watched = watched  # True under `stepscope watch`, whose hooks count the steps.
        self._counted = 0  # The last step counted by a call of `step`.
        self._begun = False
        self._closed = session is None
        self._waited_s: float | None = None
        self._samples = 0
        self._layouts: dict[tuple[str, ...], RowLayout] = {}
        """Ring layouts by the names given to `step`."""
        # Read in every step, to avoid nested attribute access.
        self._recorder: Any = session.recorder if session is not None else None
        self._pid = os.getpid()
        self._handled = sys.exc_info()[1]
        """The error that the script, or the parent of this forked process, handles now."""
        self._failed = False

    @property
    def folder(self) -> Path | None:
        """The run folder; None if it could not be created."""
        return self.session.recorder.folder if self.session else None

    @property
    def epoch(self) -> int:
        """The current epoch, set by the script."""
        return self.session.recorder.epoch if self.session else 0

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if self.session:
            self.session.recorder.epoch = _epoch(epoch, self.session.recorder.epoch)

    def step(self, values: Mapping[str, Any] | None = None, /, **metrics: Any) -> None:
        """Record one optimizer step.

        A keyword is a metric of the group `train` (`loss` is `train/loss`); `val_loss` is
        `val/loss`. The mapping `values` has full names such as `val/accuracy`. `samples` and
        `tokens` are the counts of this step, recorded as samples and tokens per second.
        """
        layout = self._layouts.get(tuple(metrics))
        if layout is None or values is not None:
            return self._step(values, metrics)
        if self._waited_s is not None or self._recorder.counts:  # measured between two steps
            return self._step(values, metrics)
        for value in metrics.values():
            if type(value) is not float:
                return self._step(values, metrics)
        if not self._recorder.record(layout, metrics.values()):
            return self._step(values, metrics)
        return None

    def log(self, values: Mapping[str, Any] | None = None, /, **metrics: Any) -> None:
        """Add values, such as a validation loss, to the last step, without counting a step.

        `samples` and `tokens` are added to the counts of the current step, which ends with the next
        `step` (under `stepscope watch`: of an optimizer). They are shown as rates.
        """
        if self.session and not self._closed:
            recorder = self.session.recorder
            with self._guarded():
                recorder.activity += 1
                given = _named(values, metrics)
                _count(recorder, given)
                if given:
                    recorder.log(recorder.step, given)

    def event(self, text: str, /, **data: Any) -> None:
        """Add a marker with this text to all charts; JSON-serializable `data` is stored."""
        if self.session and not self._closed:
            self.session.recorder.event("mark", text, **data)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches; record the data wait and the samples with the next step."""
        iterator = iter(loader)
        while True:
            began = time.perf_counter()
            try:
                with span(DATA):
                    batch = next(iterator)
            except StopIteration:
                return
            self._waited_s = (self._waited_s or 0.0) + time.perf_counter() - began
            with self._guarded():
                self._samples += batch_length(batch) or 0
                if self.session is not None:
                    self.session.recorder.activity += 1
                    self.session.readings.read_if_requested()
            yield batch

    def close(self, status: RunStatus = RunStatus.FINISHED, reason: str | None = None) -> None:
        """End the run. Does nothing in a second call, or under `stepscope watch`.

        Called at the script's exit. Outside a `with` block a script that ends by `sys.exit(3)` has
        the status finished, because its exit code is unknown.
        """
        if self.session is not None and not self._closed and not self.watched:
            self._closed = True
            self.session.close(status, reason)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.watched:
            self._end(error)

    @handlers_wait()
    def _end(self, error: BaseException | None) -> None:
        """Close with the outcome of the exception that ended the script, if any."""
        if self.session is None or self._closed:
            return
        ended = outcome(error)
        if error is not None:
            ended = self.session.failed(ended, error)
        self.close(ended.status, ended.reason)

    def _step(self, values: Mapping[str, Any] | None, metrics: Mapping[str, Any]) -> None:
        """Record a step with arbitrary values, and execute commands."""
        if self.session is None or self._closed:
            return
        recorder = self.session.recorder
        with self._guarded():
            self._record(self.session, values, metrics)
        by_hooks = self.session.optimizer_steps is not None
        counts = not by_hooks and (not self.watched or recorder.step == self._counted)
        if counts and self.session.boundary() > 0:
            recorder.restart_clock()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Suppress errors and log the first, because a metric must not end a training."""
        try:
            yield
        except Exception:
            if not self._failed:
                log.warning("stepscope: a step could not be recorded", exc_info=True)
            self._failed = True

    def _record(
        self, session: ScriptSession, values: Mapping[str, Any] | None, metrics: Mapping[str, Any]
    ) -> None:
        recorder, given = session.recorder, _named(values, metrics)
        if "train/epoch" in given:
            recorder.epoch = _epoch(given["train/epoch"], recorder.epoch)
        if session.optimizer_steps is not None:
            _count(recorder, given)
            if given:
                recorder.log(session.optimizer_steps, given)
            return
        if self.watched and recorder.step != self._counted:
            _count(recorder, given)
            recorder.log(recorder.step, given)
            return
        if recorder.counts:
            _count(recorder, given)
            given |= recorder.take_counts()
        if self._waited_s is not None:
            given[DATA_WAIT] = self._waited_s
            if self._samples:
                given.setdefault(SAMPLES, self._samples)  # the script's count takes precedence
            self._waited_s, self._samples = None, 0
        if not self._begun:
            self._begin(session, given)
        recorder.log_step(given)
        self._counted = recorder.step
        if values is None and not self.watched:
            self._remember_layout(recorder, tuple(metrics), tuple(given))

    def _begin(self, session: ScriptSession, given: Mapping[str, Any]) -> None:
        """Set the device of the training."""
        self._begun = True
        on_gpu = [value for value in given.values() if getattr(value, "is_cuda", False)]
        torch = sys.modules.get("torch")
        if on_gpu:
            session.train_on(on_gpu[0].device.index)
        elif torch is not None and torch.cuda.is_initialized():
            session.train_on(torch.cuda.current_device())
        else:
            session.train_on(None)

    def _remember_layout(
        self, recorder: Recorder, names: tuple[str, ...], keys: tuple[str, ...]
    ) -> None:
        """Enable the fast path of `step` for these names."""
        # An epoch also updates the recorder. A name with the value None has no key.
        if "epoch" in names or not 0 < len(keys) == len(names) < WIDTH:
            return
        if all(key.isascii() and len(key) <= MAX_NAME_CHARS for key in keys):
            layout = recorder.ring.layout((*STEPS, STEP_TIME, *keys))
            if layout is not None:
                self._layouts[names] = layout


def init(
    name: str | None = None,
    *,
    runs: Path | str | None = None,
    config: Mapping[str, Any] | Namespace | DataclassInstance | None = None,
    tags: Sequence[str] = (),
    group: str | None = None,
    note: str | None = None,
    sample: bool = True,
) -> Tracker:
    """Start recording this process, print the run on stderr, and return a Tracker.

    `runs` is the folder of all runs, by default STEPSCOPE_RUNS or ./runs; `config` is a mapping, a
    namespace or a dataclass; `stepscope gc` can keep runs with `tags`; runs of one `group` belong
    together; `sample` records memory and GPUs ten times a second. A second call, or a call under
    `stepscope watch`, adds its config and tags to the current run, replaces its group and note if
    given, and returns the tracker. If no run folder can be written, logs a warning and records
    nothing. Invalid values are logged and ignored.
    """
    global _current
    if _current is not None and not _current._closed and _current._pid == os.getpid():
        annotate(_current.session, config=config, tags=tags, group=group, note=note)
        return _current
    try:
        name = name or running_name()
        root = runs_root(None if runs is None else Path(runs))
        place = find_place(root, name, os.environ)
        kind, code = RunKind.INIT, running_folder()
        session = ScriptSession(place, name=name, kind=kind, script_folder=code, sample=sample)
        annotate(session, config=config, tags=tags, group=group, note=note)
    except Exception as error:  # noqa: BLE001 - no error may end the training
        log.warning("stepscope: nothing is recorded, no run folder could be made: %s", error)
        return Tracker(None)
    # A terminal rarely has the working directory of a notebook's kernel.
    announce(place, root if runs is not None or in_notebook() else None)
    _current = Tracker(session)
    if parent_process() is not None:  # forked processes skip atexit handlers
        Finalize(None, _close_at_exit, exitpriority=-100)
    return _current


def annotate(
    session: ScriptSession | None,
    *,
    config: Any = None,
    tags: Any = (),
    group: Any = None,
    note: Any = None,
) -> None:
    """Add config and tags to a run, and set group and note; log what is invalid. Never raises.

    A config may be a mapping, a namespace or a dataclass; its secrets are recorded as hidden.
    """
    if session is None:
        return
    recorder = session.recorder
    try:
        for name, text in (("group", group), ("note", note)):
            if text is not None:
                recorder.describe(**{name: to_text(text)})
        if tags:
            added = [tags] if isinstance(tags, str) else map(str, tags)
            known = recorder.run_json.get("tags") or ()
            recorder.describe(tags=list(dict.fromkeys((*known, *added))))
        if config:
            values = {key: to_json(_fields(value)) for key, value in _fields(config).items()}
            shown = with_hidden_secrets("", values)
            recorder.describe(config={**recorder.run_json["config"], **shown})
    except Exception as error:  # noqa: BLE001 - the script's values may raise anything
        log.warning(
            "stepscope: config must be a mapping and tags a sequence of texts; ignored (%r)", error
        )


def _fields(value: Any) -> Any:
    """Return a namespace or dataclass as a dict, any other value unchanged."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return vars(value) if isinstance(value, Namespace) else value


def attach(session: ScriptSession) -> Tracker:
    """Make `init` return a tracker of this run; `stepscope watch` calls it before the script."""
    global _current
    _current = Tracker(session, watched=True)
    return _current


def current() -> Tracker | None:
    return _current


def batch_length(batch: Any) -> int | None:
    """Return the size of the first dimension of a tensor or array, or of all those in a batch.

    Returns None if the sizes differ, such as for a list of samples, or are at deeper levels.
    """
    parts: Iterable[Any] = ()
    if hasattr(batch, "shape"):
        parts = (batch,)
    elif isinstance(batch, list | tuple):
        parts = batch
    elif isinstance(batch, Mapping):
        parts = batch.values()
    shapes = (getattr(part, "shape", None) for part in parts)
    lengths = {int(shape[0]) for shape in shapes if isinstance(shape, tuple) and shape}
    return lengths.pop() if len(lengths) == 1 else None


@atexit.register
def _close_at_exit() -> None:
    if _current is None or _current.watched or _current._pid != os.getpid():
        return  # `stepscope watch` closes its run itself
    # A process of multiprocessing ends with its exception in flight. An interactive interpreter
    # keeps earlier ones.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    is_earlier = error is _current._handled or hasattr(sys, "ps1")
    _current._end(None if is_earlier else error)


def _count(recorder: Recorder, given: dict[str, Any]) -> None:
    """Add samples and tokens to the counts of the current step."""
    for key in RATES.keys() & given.keys():
        recorder.count(key, given.pop(key))


def _epoch(epoch: Any, before: int) -> int:
    """Return an epoch that the store can represent; `before` if it is not a number."""
    try:
        return max(0, min(int(epoch), 2**53))
    except Exception:  # noqa: BLE001 - the value is the script's and may raise anything
        return before


def _named(values: Mapping[str, Any] | None, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return dict(values or {}) | {_key(name): value for name, value in metrics.items()}


def _key(name: str) -> str:
    if f"perf/{name}" in RATES:
        return f"perf/{name}"
    group, _, rest = name.partition("_")
    return f"val/{rest}" if group == "val" and rest else f"train/{name}"
