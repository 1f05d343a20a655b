"""What all tabs share: the run folders, the devices, and the one active run or sweep.

The only `st.cache_resource` of the app. Everything is made here and handed down.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil
import streamlit as st

from dashboard.collective_runs import CollectiveRuns
from dashboard.crash_watch import CrashWatch
from dashboard.estimate_runs import FitRuns
from dashboard.hangs import Hangs
from dashboard.lesson_runs import LessonRuns
from dashboard.machine.machine_poller import MachineWatch
from dashboard.machine.run_energy import RunEnergies
from dashboard.run_index import RunIndex
from dashboard.run_summary import RunSummary, summarize
from dashboard.snapshot_files import Snapshots
from dashboard.stragglers import Stragglers
from dashboard.sweeps import Sweeps
from dashboard.verdicts import Verdicts
from stepscope.gpu.machine_monitor import Machine
from stepscope.gpu.source import open_source
from stepscope.run import (
    RunError,
    RunInfo,
    rank_pids,
    read_run,
    run_folder,
    run_folders,
    runs_root,
)
from stepscope.session import stop as force
from trainer.collectives.plan import Plan as CollectivePlan
from trainer.config import RunConfig
from trainer.config_validation import TrainDevice
from trainer.lab.folder import SweepError
from trainer.lab.plan import Plan
from trainer.lessons import Lesson
from trainer.runners import ActiveRun, start
from trainer.runners.torchrun import TorchrunRun
from trainer.runners.weights import read_weights

log = logging.getLogger(__name__)

PROJECT = Path(__file__).resolve().parent.parent
STOP_TIMEOUT_S = 4.0
JOB_STOP_TIMEOUT_S = 9.0
"""For ranks, which agree on a step first; a container is killed 10 s after its SIGTERM."""
CLIENTS_S = 1.0
"""Time that connected clients have to end their requests once everything has been stopped."""
FIT_WORKS = "A prediction is at work and would disturb it. Wait some seconds, or stop it."
COLLECTIVES = (
    "Collectives are being measured and would be disturbed. Wait for the end, or stop it on the "
    "page Communication."
)
FIT_MEASURES = "The largest batch is being measured. Wait for its end, or stop it."


@dataclass(frozen=True, slots=True)
class Devices:
    """What training could run on, best first, and why there is no GPU among them (or None)."""

    devices: list[TrainDevice]
    cuda_reason: str | None


class Services:
    """One a server; every method may be called from any session's thread."""

    def __init__(self, runs: Path, examples: Path) -> None:
        self.runs = runs
        self.examples = examples
        self.index = RunIndex(runs)
        self.lessons = LessonRuns()
        self.fits = FitRuns(runs)
        self.collectives = CollectiveRuns(runs)
        self.stragglers = Stragglers()
        self.verdicts = Verdicts(stragglers=self.stragglers)
        self.hangs = Hangs()
        self.sweeps = Sweeps(runs, examples)
        self.snapshots = Snapshots(runs)
        self.machine = MachineWatch(Machine(functools.partial(open_source, reader="page")))
        self.energies = RunEnergies()
        self._summaries: dict[str, RunSummary] = {}
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._active: ActiveRun | None = None
        self._devices: Future[Devices] = Future()
        # torch takes seconds to import: the first page is being loaded meanwhile.
        threading.Thread(target=self._find_devices, name="stepscope-devices", daemon=True).start()

    def devices(self) -> Devices:
        """Return the devices, waiting for torch to be imported if need be."""
        return self._devices.result()

    @property
    def devices_known(self) -> bool:
        """True once `devices` answers at once."""
        return self._devices.done()

    def start(self, config: RunConfig) -> Path:
        """Start a run and return its folder.

        Raises RunError while another one, a sweep or a lesson is active, OSError where it cannot be
        started.
        """
        with self._lock:
            lesson = self.lesson_refusal()
            if lesson is not None:
                raise RunError(f"Start: {lesson}")
            if self.fits.measuring():
                raise RunError(f"Start: {FIT_MEASURES}")
            sweep = self.sweeps.active_id()
            if sweep is not None:
                raise RunError(
                    f"Start: a training would disturb what the sweep {sweep} measures. "
                    "Stop the sweep first."
                )
            active = self.active_id()
            if active is not None:
                raise RunError(
                    f"Start: one run at a time, got a second while {active} is active. "
                    "Stop it first."
                )
            if self._active is not None:
                # It has written its end; its thread or process needs a moment to be gone.
                self._active.stop(STOP_TIMEOUT_S)
                if self._active.alive():
                    raise RunError(
                        f"Start: {self._active.folder.name} has ended, but its training does not "
                        "let go. Try again in a moment; if it stays so, restart the server."
                    )
            self._active = start(config, self.runs)
            return self._active.folder

    def start_sweep(self, plan: Plan) -> str:
        """Start a sweep and return its id.

        Raises SweepError while a run, a lesson or another sweep is active, OSError where it cannot
        be started.
        """
        with self._lock:
            self._refuse_second_sweep()
            return self.sweeps.start(plan)

    def resume_sweep(self, sweep_id: str) -> None:
        """Go on with a sweep. Raises as `start_sweep`, and SweepError for one that has finished."""
        with self._lock:
            self._refuse_second_sweep()
            self.sweeps.resume(sweep_id)

    def start_lesson(self, lesson: Lesson) -> None:
        """Run a lesson. Raises RunError beside a run, a sweep or a lesson, OSError as a run."""
        with self._lock:
            busy = self.active_id() or self.sweeps.active_id()
            if self.fits.running() is not None:
                raise RunError(f"Run: {FIT_WORKS}")
            if busy is not None:
                raise RunError(f"Run: {busy} is active and would disturb it. Stop it first.")
            if self.collectives.running() is not None:
                raise RunError(f"Run: {COLLECTIVES}")
            self.lessons.start(lesson)

    def start_collectives(self, plan: CollectivePlan) -> None:
        """Measure collectives. Raises RunError beside whatever it would disturb, OSError as a run.

        `collective_refusal` says why it would not start.
        """
        with self._lock:
            refused = self.collective_refusal()
            if refused is not None:
                raise RunError(f"Measure: {refused}")
            self.collectives.start(plan)

    def collective_refusal(self) -> str | None:
        """Say why no collectives can be measured now; None where they can."""
        busy = self.active_id() or self.sweeps.active_id()
        if busy is not None:
            return f"{busy} is running and would disturb the measurement. Stop it first."
        return self.lesson_refusal() or (FIT_WORKS if self.fits.running() is not None else None)

    def start_fit(self, config: RunConfig, *, largest: bool) -> None:
        """Predict a run's memory; with `largest` also measure throughput in short runs.

        Raises RunError where it would disturb a measurement, OSError as a run.
        """
        with self._lock:
            refused = self.fit_refusal(largest=largest)
            if refused is not None:
                raise RunError(f"Fit: {refused}")
            self.fits.start(config, largest=largest)

    def fit_refusal(self, *, largest: bool) -> str | None:
        """Say why nothing can be predicted now; None where it can."""
        if self.fits.running() is not None:
            return "One prediction at a time: wait for it, or stop it."
        sweep, run = self.sweeps.active_id(), self.active_id()
        if sweep is not None:
            return f"The sweep {sweep} measures and would be disturbed. Stop it first."
        if largest and run is not None:
            return f"The run {run} is active and would disturb the measurement. Stop it first."
        return self.lesson_refusal()

    def lesson_refusal(self) -> str | None:
        """Say why nothing can be started beside a lesson or a measurement of collectives."""
        if self.collectives.running() is not None:
            return COLLECTIVES
        lesson = self.lessons.running()
        if lesson is None:
            return None
        return (
            f"The lesson “{lesson.title}” is running and would disturb the measurement. "
            "Wait for its end, or stop it on the page Learn."
        )

    def measuring(self, max_age_s: float = 0.0) -> str | None:
        """Return the sweep, as of at most `max_age_s` ago, or the lesson that runs now, if any."""
        lesson = self.lessons.running()
        return self.sweeps.active_id(max_age_s) or (lesson.name if lesson is not None else None)

    def sweep_refusal(self) -> str | None:
        """Say why no sweep can be started or resumed now; None where one can."""
        run, other = self.active_id(), self.sweeps.active_id()
        if run is not None:
            return f"The run {run} is active and would disturb the measurement. Stop it first."
        if other is not None:
            return f"One sweep at a time: {other} is measuring. Stop it first."
        return self.lesson_refusal() or (FIT_WORKS if self.fits.running() is not None else None)

    def _refuse_second_sweep(self) -> None:
        refused = self.sweep_refusal()
        if refused is not None:
            raise SweepError(refused)

    def active_id(self) -> str | None:
        """Return the id of the run that this server is training, if any."""
        active = self._active
        if active is None or not active.alive():
            return None
        folder = active.folder
        try:
            live = read_run(folder).status.live or active.goes_on()
        except RunError:
            live = True  # somebody took the folder away; the loop does not know yet
        return folder.name if live else None

    def folder(self, run_id: str) -> Path:
        """Return the folder of a run or example. Raises RunError for an unknown or unsafe id."""
        try:
            return run_folder(self.runs, run_id)
        except RunError:
            with contextlib.suppress(RunError):
                return run_folder(self.examples, run_id)
            raise  # it names the folder of the runs, not that of the examples

    def list_runs(self) -> list[RunInfo]:
        """Return the readable runs, live ones first, then newest first.

        Older ones than the list holds open by their address.
        """
        return list(self.index.fresh().runs)

    def list_examples(self) -> list[RunInfo]:
        """Return the recorded examples, none in an installation without them."""
        found = []
        for folder in reversed(list(run_folders(self.examples))):
            with contextlib.suppress(RunError):
                found.append(read_run(folder))
        return found

    def summary(self, run: RunInfo) -> RunSummary:
        """Return the run's best loss, rate and peaks; those of an ended run are read once."""
        summary = self._summaries.get(run.id) or summarize(run)
        if not run.status.live:
            self._summaries[run.id] = summary
        return summary

    def weights(self, run_id: str, name: str) -> bytes:
        """Return the weights alone of a checkpoint. Raises RunError and OSError."""
        return read_weights(self.folder(run_id) / name)

    def cuda_indices(self) -> dict[str, int]:
        """Return torch's index of each GPU that it sees, by UUID; {} while it is being imported."""
        found = self.devices().devices if self.devices_known else []
        return {gpu.id: gpu.cuda_index for gpu in found if gpu.cuda_index is not None}

    def run_processes(self) -> dict[int, str]:
        """Return the names of this machine's live runs by the numbers of their processes."""
        live = [run for run in self.index.recent().runs if run.status.live]
        return {
            pid: str(run.run_json.get("name") or run.id) for run in live for pid in rank_pids(run)
        }

    def end_job(self, run: RunInfo) -> str:
        """End all ranks of a job by force, and return a sentence on it; takes some seconds."""
        with self._lock:
            active = self._active
        if active is None or active.folder.name != run.id or not active.alive():
            return force.end_job(run)
        stop = active.end_now if isinstance(active, TorchrunRun) else active.stop
        if stop(force.TERM_S):  # it also keeps torchrun from starting the ranks again
            return "End now: the job has stopped."
        active.end_with_server()
        return "End now: the ranks did not stop, and were killed."

    def close(self) -> None:
        """Stop what is active and flush its data; a second call only waits for the first."""
        with self._closing:
            self.lessons.close()
            self.fits.close()
            self.collectives.close()
            with self._lock:
                active, self._active = self._active, None
            patience_s = JOB_STOP_TIMEOUT_S if isinstance(active, TorchrunRun) else STOP_TIMEOUT_S
            if active is not None and not active.stop(patience_s):
                log.warning("run %s did not stop in time", active.folder.name)
                active.end_with_server()
            self.sweeps.close(STOP_TIMEOUT_S)
            self.snapshots.close()
            self.machine.close()

    def _find_devices(self) -> None:
        try:
            found = importlib.import_module("trainer.devices")
            devices = Devices(found.list_devices(), found.cuda_reason())
        except Exception as error:  # a broken torch must not take recorded runs from the page
            log.exception("devices could not be listed")
            reason = f"PyTorch could not be loaded ({error}). Reinstall it, then restart."
            total = psutil.virtual_memory().total
            cpu = TrainDevice(id="cpu", name="CPU", memory_total=total, reason=reason)
            devices = Devices([cpu], reason)
        self._devices.set_result(devices)
        # What was imported stays: without it every full collection would walk a million objects.
        gc.freeze()


@st.cache_resource(show_spinner=False)
def get() -> Services:
    """Return the server's services, made on first use; run folders under STEPSCOPE_RUNS."""
    services = Services(runs_root(), PROJECT / "examples")
    atexit.register(services.close)
    return services


@asynccontextmanager
async def lifespan(_app: object) -> AsyncIterator[None]:
    """Stop the run and flush its data when the server ends (SIGTERM runs no atexit)."""
    services, over = get(), threading.Event()
    _end_on_signals(services, over)
    crashes = CrashWatch(services.index)
    crashes.start()
    yield
    crashes.close()
    await asyncio.to_thread(services.close)
    over.set()


def _end_on_signals(services: Services, over: threading.Event) -> None:
    """Make SIGTERM and SIGINT stop the run at once, and end the process although clients hold on.

    uvicorn waits for every open request, without limit, before it ends the lifespan. `over` is set
    once it has. Does nothing where a test runs the app in another thread than the main one.
    """

    def end(number: int) -> None:
        try:
            services.close()
        finally:
            if not over.wait(CLIENTS_S):
                log.warning("some clients hold their connections: they are cut off")
                os._exit(128 + number)

    def handle(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=end, args=(number,), name="stepscope-end", daemon=True).start()
        former = formers[signal.Signals(number)]
        if callable(former):
            former(number, frame)

    if threading.current_thread() is threading.main_thread():
        numbers = (signal.SIGTERM, signal.SIGINT)
        formers = {number: signal.signal(number, handle) for number in numbers}
