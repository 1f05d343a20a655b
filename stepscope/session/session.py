"""The session of one run in one process: recorder, sampler, commands and alerts."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from stepscope.alerts import settings as alert_settings
from stepscope.alerts.monitor import AlertMonitor
from stepscope.common.clock import clock
from stepscope.common.files import atomic_write
from stepscope.common.formatting import terminal_text
from stepscope.common.stall_detector import StallDetector
from stepscope.distributed.flight_recorder import open_pipe
from stepscope.distributed.hangs.watchdog import HangWatchdog
from stepscope.gpu.device_info import DeviceInfo
from stepscope.gpu.source import DeviceSource, NullSource, is_simulated
from stepscope.host.environment import environment, torch_versions
from stepscope.host.usage import first_count
from stepscope.memory.growth import GrowthMonitor
from stepscope.memory.oom.classify import OomCause, diagnose
from stepscope.memory.oom.observer import OomObserver
from stepscope.memory.oom.recommendations import Allowed
from stepscope.run import RunStatus, rank_file
from stepscope.run.folder import TRACEBACK_FILE, fatal_signals_recorded
from stepscope.run.status import RunOutcome, with_cause
from stepscope.run_setup import setup_of
from stepscope.session.code_sampler import CodeSampler, TrainingThread
from stepscope.session.command_server import CommandHandler, CommandServer
from stepscope.session.job_commands import JobCommands
from stepscope.session.sampler import Sampler
from stepscope.session.stop import handlers_wait
from stepscope.session.training_facts import WRITE_S, Compilation, TrainingFacts, facts_file
from stepscope.store import StoreError
from stepscope.store.commands import Command
from stepscope.store.recorder import CommandName, Recorder

SWITCH = "STEPSCOPE_CODE_LINES"
"""Environment variable; "off" disables the sampling of Python stacks."""
MAX_COMPILATIONS = 20  # that are kept with their reason
MAX_REASON = 300


class TrainingObserver:
    """Facts of one process. `observe` runs in the sampler's thread; hooks add to `facts`.

    The hooks' objects in `facts` belong to the training thread: a file may show one step of them
    more in one number than in another.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        step: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.thread = TrainingThread()
        self.facts = TrainingFacts()
        self._file = facts_file(folder, number)
        self._step = step
        self._clock = clock
        self._code = None
        if os.environ.get(SWITCH) != "off":
            self._code = CodeSampler(self.thread, step, clock)
        self._write_at = clock()
        self._written = b""
        self._newest_compilation = 0

    def sample_code(self, late_s: float) -> None:
        """Take one sample, whose time was `late_s` ago."""
        if self._code is not None:
            self._code.tick(late_s)

    def observe(self, _values: Mapping[str, float]) -> None:
        """Write the facts if they are due."""
        now = self._clock()
        if now >= self._write_at:
            self._write_at = now + WRITE_S
            self.write()

    def write(self) -> None:
        """Replace the file if the facts have changed; logs an error of the disk."""
        self._find_compilations()
        if self._code is not None:
            self.facts.periods, self.facts.lines = self._code.results()
        content = msgspec.json.encode(self.facts)
        if content == self._written or content == _EMPTY:
            return
        try:
            atomic_write(self._file, content, durable=False)
            self._written = content
        except OSError as error:
            log.debug("stepscope: %s could not be written: %s", self._file.name, error)

    def _find_compilations(self) -> None:
        """Add the compilations that torch has counted since the last call."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return
        # Private names of torch, which another version may not have.
        with suppress(AttributeError, KeyError, TypeError):
            found = int(utils.counters["stats"]["unique_graphs"])
            facts = self.facts
            if found == facts.compilation_count:
                return
            facts.compilation_count = found
            for metrics in utils.get_compilation_metrics():
                began = int(metrics.start_time_us)
                if began <= self._newest_compilation or metrics.co_name is None:
                    continue
                self._newest_compilation = began
                reason = str(metrics.recompile_reason or "")[:MAX_REASON]
                facts.compilations.append(Compilation(step=self._step(), reason=reason))
            del facts.compilations[:-MAX_COMPILATIONS]


_EMPTY = msgspec.json.encode(TrainingFacts())


log = logging.getLogger(__name__)

MAX_TRACEBACK_CHARS = 20_000  # In the event.


GpuEntry = Mapping[str, Any]
"""A GPU in run.json: `uuid`, `name`, `memory_total` in bytes, and perhaps `simulated`."""


class Session:
    """One run of this process: a recorder, and on request a sampler and a command server.

    `folder` exists. `rank` is the folder rank of this process. `code` is a folder whose git commit
    is recorded. If several `ranks` share the folder, all take a command at the same step (`lead`:
    see `Participant`). `options` are those of `Recorder`. Raises OSError or StoreError.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        ranks: int = 1,
        lead: int = 1,
        code: Path | None = None,
        **options: Any,
    ) -> None:
        folder = folder.absolute()  # a script may change its working directory
        try:
            self.recorder = Recorder(
                folder, rank=rank, ranks=ranks, on_command=self.announce, **options
            )
        except (OSError, StoreError):
            with suppress(OSError):  # the files of another rank, or of an earlier run
                folder.rmdir()
            raise
        self._source: DeviceSource = NullSource("Sampling has not begun.")
        self._server: Callable[[], CommandServer | None] = lambda: None
        if ranks > 1:
            self.share_commands(ranks, lead)
        self.alerts = AlertMonitor(alert_settings.load(), folder, rank=rank)
        self._stalls = StallDetector()
        self._hangs = HangWatchdog(self.recorder, rank, self._stalls)
        self.recorder.observe(self.alerts.add, self._check)
        self._code = code
        self._pid = os.getpid()
        self._is_closed = False
        self._rank = rank
        self._at_close = ExitStack()
        self._at_close.enter_context(fatal_signals_recorded(folder, rank))
        recorder = self.recorder
        self.observer = TrainingObserver(folder, rank, lambda: recorder.step)
        self._growth = GrowthMonitor(self.recorder)
        growth = self._growth.allocated_growth
        self.oom = OomObserver(self.recorder, growth, rank, first_count())
        self.recorder.describe(oom_kills=self.oom.first_kills)
        self._at_close.callback(self.oom.close)

    def share_commands(self, ranks: int, lead: int) -> None:
        """Take commands in step with all `ranks`; only before the first step. Raises OSError."""
        job = JobCommands(
            self.recorder,
            ranks,
            lead=lead,
            step=self._command_step,
            on_command=self.announce,
            on_withdrawn=self.runs_alone,
        )
        self.recorder.commands = job

    def announce(self, command: Command) -> None:
        """Prepare for a command that the training will execute. Called by another thread."""
        if command.name is CommandName.STOP and "stop_asked" not in self.recorder.run_json:
            self.recorder.describe(stop_asked=clock.now())  # it may never be executed

    def runs_alone(self, command: Command) -> bool:
        """Return True if this rank executes a withdrawn command. Called by another thread."""
        return False

    def _command_step(self) -> int:
        server = self._server()
        return self.recorder.step if server is None else server.step()

    def sample(
        self,
        source: DeviceSource,
        gpus: Iterable[GpuEntry],
        *,
        trains_on: str | None = None,
        start: bool = True,
        **options: Any,
    ) -> Sampler:
        """Sample these GPUs of `source` until `close`, and record the environment.

        `trains_on` is the name of the training GPU, if known. `options` are those of `Sampler`.
        Without `start` nothing is sampled, but commands can read memory.
        """
        gpus, self._source = list(gpus), source
        uuids = [gpu["uuid"] for gpu in gpus]
        thread = self.observer.thread
        sampler = Sampler(self.recorder, source=source, gpu_uuids=uuids, thread=thread, **options)
        sampler.observers += [self._growth.observe, self.oom.observe, self.observer.observe]
        sampler.on_wake = self.observer.sample_code
        self.recorder.describe(devices=gpus)
        self.describe_environment(trains_on)
        self._at_close.callback(self.observer.write)  # after the sampler's end
        self._at_close.callback(sampler.stop)
        if start:
            sampler.start()
        return sampler

    def open_nccl_pipe(self) -> None:
        """Open NCCL's debug pipe to read hangs; call before the process group starts."""
        close = open_pipe(self.recorder.folder)
        if close is not None:
            self._at_close.callback(close)

    def describe_environment(self, gpu: str | None) -> None:
        """Record software and hardware; `gpu` is the name of the training GPU, if known."""
        driver = next((info.driver_version for info in self._source.devices()), None)
        self.recorder.describe(environment=environment(driver, gpu, self._code))

    def describe_torch(self) -> None:
        """Record the versions of torch, at its import.

        The number of its threads is recorded later: the script may change it before torch reads it.
        """
        before = self.recorder.run_json["environment"]
        self.recorder.describe(environment={**before, **torch_versions()})

    def answer(
        self,
        sampler: Sampler,
        own: Mapping[CommandName, CommandHandler],
        *,
        check: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> CommandServer:
        """Return a CommandServer that the caller closes; list its commands in run.json."""

        def check_all() -> None:
            if self.oom.pending:
                self.oom.settle()
            check()

        server = CommandServer(self.recorder, sampler, own, check=check_all, **options)
        self.recorder.describe(commands=server.supported_commands())
        # A weak reference: the handlers hold the model, which is freed before the session.
        self._server = weakref.ref(server)
        return server

    def record_memory_failure(
        self, outcome: RunOutcome, error: BaseException, allowed: Allowed | None = None
    ) -> RunOutcome:
        """Record a memory failure with its stack; return the outcome with the OOM cause."""
        outcome = self.oom.with_lost_worker(error, outcome)
        report = self.oom.failed(error, outcome)
        if report is None:
            return outcome
        setup = setup_of(self.recorder.run_json)
        finding = diagnose(report.last, setup, allowed=allowed)
        remedy = finding.recommendations[0].text if finding.recommendations else None
        if finding.cause is OomCause.HOST and not setup.own:
            return with_cause(outcome, None, remedy)
        if finding.cause in (OomCause.UNKNOWN, OomCause.HOST):
            return outcome  # unknown, or the outcome's reason already contains it
        if finding.cause is OomCause.TOO_LARGE:
            remedy = None  # the reason has one
        return with_cause(outcome, finding.cause.lower(), remedy)

    def note_failure(
        self, outcome: RunOutcome, trace: str | None, **memory: Mapping[str, float]
    ) -> None:
        """Record an event for the failure, with memory (bytes), and write the traceback."""
        if trace is not None:
            path = self.recorder.folder / rank_file(TRACEBACK_FILE, self._rank)
            try:
                atomic_write(path, trace.encode(errors="backslashreplace"))
            except OSError as error:
                log.warning("stepscope: the traceback was not written: %s", error)
        shown = {} if trace is None else {"traceback": trace[-MAX_TRACEBACK_CHARS:]}
        self.recorder.event(outcome.failure or "error", outcome.reason or "", **memory, **shown)

    @handlers_wait()
    def close(self, status: RunStatus, reason: str | None = None) -> None:
        """End the run. A second call, or a call in a forked child, does nothing."""
        if os.getpid() == self._pid and not self._is_closed:
            self._is_closed = True
            try:
                self._at_close.close()
            finally:  # Ctrl-C may come during a join
                self._hangs.close(status)
                recorder = self.recorder
                event = self.alerts.ended(recorder.run_json, recorder.step, status, reason)
                if event is not None:
                    recorder.event(*event[:2], **event[2])
                recorder.close(status, reason)

    def _check(
        self, run_json: Mapping[str, Any], step: int
    ) -> Sequence[tuple[str, str, dict[str, Any]]]:
        """Return the events of hangs and alerts; called about once a second."""
        total_steps = run_json.get("total_steps") or math.inf
        is_training = run_json.get("status") == RunStatus.RUNNING and step < total_steps
        server = self._server()
        is_busy = server is not None and server.busy
        gap = self._stalls.update(
            time.monotonic(), step, due=is_training and not is_busy, work=self.recorder.activity
        )
        hang_events = self._hangs.check(run_json, step, gap)
        hang = self._hangs.hang
        cause = None if hang is None else hang.what  # An alert quotes it.
        return [*hang_events, *self.alerts.check(run_json, step, gap, cause)]


def listed(gpu: DeviceInfo) -> GpuEntry:
    return gpu_entry(gpu.uuid, gpu.name, gpu.memory_total)


def gpu_entry(uuid: str, name: str, memory_total: int | None) -> GpuEntry:
    """Return an entry of run.json; only that of a simulated GPU has the key `simulated`."""
    entry: dict[str, Any] = {"uuid": uuid, "name": name, "memory_total": memory_total}
    return entry | {"simulated": True} if is_simulated(uuid) else entry


def traceback_text(error: BaseException) -> str:
    """Format a traceback without terminal colors."""
    return terminal_text("".join(traceback.format_exception(error)))
