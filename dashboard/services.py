"""State that all tabs share; `get` is the only `st.cache_resource` of the app."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TypeVar

import psutil
import streamlit as st

from dashboard.crash_watch import CrashWatch
from dashboard.machine.machine_poller import MachinePoller
from dashboard.ranks.job_ranks import read_job
from dashboard.run_analyzer import RunAnalyzer, find
from dashboard.run_list import RunList
from dashboard.sweeps import Sweeps
from stepscope.common.json_values import dict_of
from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.source import is_simulated, open_source
from stepscope.host.child_process import call_at_end_of
from stepscope.host.servers import withdraw_server
from stepscope.remote.source import RemoteSource, sources_from_environment
from stepscope.run import (
    RunError,
    RunInfo,
    own_ranks,
    read_run,
    run_folder,
    run_folders,
    runs_root,
)
from stepscope.run.rank_info import RankInfo
from stepscope.session import stop as force
from trainer.config import RunConfig
from trainer.lessons import Lesson
from trainer.runners import RunHandle, start
from trainer.runners.child_process import PROJECT, LessonRun, MemoryProbeRun, TorchrunRun
from trainer.training.config_validation import TrainDevice

log = logging.getLogger(__name__)

PACKAGES = {"torch": "PyTorch", "sklearn": "scikit-learn", "scipy": "scipy", "PIL": "pillow"}
"""What built-in training, the Lab and the lessons import, and the names for pip."""
INSTALL_TRAIN = "pip install torch scikit-learn scipy pillow"
STOP_TIMEOUT_S = 4.0
JOB_STOP_TIMEOUT_S = 9.0
"""For ranks, which agree on a step first; a container is killed 10 s after its SIGTERM."""
CLIENTS_S = 1.0  # Time that clients have to end their requests once everything has stopped.

T = TypeVar("T")


class ServerActivity(StrEnum):
    """Activities that the server starts on this machine."""

    RUN = "run"
    SWEEP = "sweep"
    LESSON = "lesson"
    MEMORY_PROBE = "memory probe"


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices for training, best first, and why none of them is a GPU (or None)."""

    devices: list[TrainDevice]
    cuda_reason: str | None

    @property
    def simulated(self) -> bool:
        """True if the simulator provides the GPUs."""
        return any(is_simulated(device.id) for device in self.devices)


@functools.cache
def missing_package() -> str | None:
    """Return which package of the built-in training is missing, and the fix; None if none is."""
    for module, name in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            return f"{name} is not installed. Run {INSTALL_TRAIN}, then restart Stepscope."
    return None


class Services:
    """The shared state of one server. Thread-safe.

    `roots`: `runs` for new runs, more `folders`, those of `sources`, with the label of their runs.
    """

    def __init__(
        self,
        runs: Path,
        examples: Path,
        folders: Sequence[Path] = (),
        sources: Sequence[RemoteSource] = (),
    ) -> None:
        self.runs = runs
        self.examples = examples
        self.sources = tuple(sources)
        labels = {folder: str(folder) for folder in folders if folder != runs}
        labels |= {source.folder: source.label for source in sources}
        self.roots: dict[Path, str | None] = {runs: None, **labels}
        self.run_list = RunList(*self.roots, mirrors={source.folder for source in sources})
        self.lessons: dict[str, LessonRun] = {}  # The last run of each lesson.
        self.probe: MemoryProbeRun | None = None  # The last one.
        self.findings = RunAnalyzer(
            lambda run: find(run, self.known_devices()), "the run cannot be diagnosed"
        )
        self.ranks = RunAnalyzer(read_job, "the ranks cannot be read")
        self.sweeps = Sweeps(runs, examples)
        self.machine = MachinePoller(MachineMonitor(functools.partial(open_source, reader="page")))
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._active: RunHandle | None = None
        self._devices: Future[Devices] = Future()
        # torch takes seconds to import: the first page is being loaded meanwhile.
        threading.Thread(target=self._find_devices, name="stepscope-devices", daemon=True).start()

    def devices(self) -> Devices:
        """Return the devices; waits for the import of torch."""
        return self._devices.result()

    def known_devices(self) -> list[TrainDevice]:
        """Return the devices; [] while torch is being imported."""
        return self.devices().devices if self._devices.done() else []

    def begin(self, starting: ServerActivity, start: Callable[[], T]) -> T:
        """Call `start` and return its result. Raises RunError while another activity runs."""
        with self._lock:
            self._check_idle(starting)
            return start()

    def _check_idle(self, starting: ServerActivity) -> None:
        reason = self.busy_reason(starting)
        if reason is not None:
            raise RunError(reason)

    def start(self, config: RunConfig) -> Path:
        """Start a run and return its folder. Raises as `begin`, OSError if it cannot be started."""
        with self._lock:
            self._check_idle(ServerActivity.RUN)
            if self._active is not None:
                # Its end is recorded; its thread or process may need a moment to exit.
                self._active.stop(STOP_TIMEOUT_S)
                if self._active.alive():
                    raise RunError(
                        f"Start: {self._active.folder.name} has ended but has not shut down "
                        "yet. Try again in a moment; if it persists, restart the server."
                    )
            self._active = start(config, self.runs)
            return self._active.folder

    def start_lesson(self, lesson: Lesson) -> None:
        """Run a lesson in a process of its own. Raises as `begin`, and OSError."""
        with self._lock:
            self._check_idle(ServerActivity.LESSON)
            self.lessons[lesson.name] = LessonRun(lesson)

    def start_probe(self, config: RunConfig, *, search: bool) -> None:
        """Start a memory probe, and end the former one. Raises as `begin`, and OSError."""
        with self._lock:
            self._check_idle(ServerActivity.MEMORY_PROBE)
            self.drop_probe()
            self.probe = MemoryProbeRun(config, search=search)

    def drop_probe(self) -> None:
        """Forget the last memory probe; end it if it still runs."""
        probe = self.probe
        self.probe = None
        if probe is not None:
            probe.stop()

    def busy_reason(self, starting: ServerActivity, device: str = "cpu") -> str | None:
        """Return why `starting` cannot begin now on a device; None if it can."""
        if (missing := missing_package()) is not None:
            return missing
        for active, doing in self._activities():
            # Another probe replaces the one that is running.
            if {active, starting} != {ServerActivity.MEMORY_PROBE}:
                return f"{doing} Stop it first, or wait for its end."
        if device == "cpu":
            return None
        for run, rank in self._live_ranks():
            config = dict_of(rank.run_json.get("config"))
            if device in (rank.run_json.get("device"), config.get("device")):
                return f"The run {run.id} uses this device. Wait for its end."
        return None

    def _activities(self) -> Iterator[tuple[ServerActivity, str]]:
        """Yield the current activities, each as a sentence."""
        if (run := self.active_id()) is not None:
            yield ServerActivity.RUN, f"The run {run} is active."
        if (sweep := self.sweeps.active_id()) is not None:
            yield ServerActivity.SWEEP, f"The sweep {sweep} is measuring."
        if (lesson := self.running_lesson()) is not None:
            yield ServerActivity.LESSON, f"The lesson “{lesson.lesson.title}” is running."
        if self.probe is not None and self.probe.running():
            doing = "A batch size search" if self.probe.search else "A memory estimate"
            yield ServerActivity.MEMORY_PROBE, f"{doing} is running."

    def running_lesson(self) -> LessonRun | None:
        return next((run for run in list(self.lessons.values()) if run.running()), None)

    def active_id(self) -> str | None:
        """Return the id of the run that this server trains, or None."""
        active = self._active
        if active is None or not active.alive():
            return None
        with contextlib.suppress(RunError):  # about to begin, or its folder was removed
            if not read_run(active.folder).status.live:
                return None
        return active.folder.name

    def folder(self, run_id: str) -> Path:
        """Return the folder of a run or example. Raises RunError for an unknown or unsafe id."""
        for root in (*self.roots, self.examples):
            with contextlib.suppress(RunError):
                return run_folder(root, run_id)
        return run_folder(self.runs, run_id)  # raises: the message names the runs folder

    def source_of(self, run: RunInfo) -> RemoteSource | None:
        """Return the connection to the host of a remote run; None for a local run."""
        return next((each for each in self.sources if each.folder == run.folder.parent), None)

    def list_examples(self) -> list[RunInfo]:
        """Return the recorded examples, if installed, the GPU's first."""
        found = []
        for folder in reversed(list(run_folders(self.examples))):
            with contextlib.suppress(RunError):
                found.append(read_run(folder))
        return sorted(found, key=lambda run: run.id != "h100")

    def cuda_indices(self) -> dict[str, int]:
        """Return torch's GPU indices by UUID; {} while torch is being imported."""
        found = self.known_devices()
        return {gpu.id: gpu.cuda_index for gpu in found if gpu.cuda_index is not None}

    def run_processes(self) -> dict[int, str]:
        """Return the names of this machine's live runs by process ID."""
        return {
            rank.run_json["pid"]: str(run.run_json.get("name") or run.id)
            for run, rank in self._live_ranks()
        }

    def _live_ranks(self) -> Iterator[tuple[RunInfo, RankInfo]]:
        """Yield the live runs of this machine and user with each of their live ranks."""
        for run in self.run_list.recent().runs:
            if run.status.live:
                for rank in own_ranks(run):
                    yield run, rank

    def end_job(self, run: RunInfo) -> str:
        """End all ranks of a distributed run by force; return the result. Takes seconds."""
        active = self._active
        if active is None or active.folder.name != run.id or not active.alive():
            return force.end_job(run)
        if active.stop(force.TERM_S):
            return "Force stop: the run has stopped."
        if isinstance(active, TorchrunRun):
            active.note_stopped("Ended by force from the page: SIGTERM, then SIGKILL.")
        return "Force stop: the ranks did not exit and were killed."

    def close(self) -> None:
        """Stop all activities and flush their data; a second call waits for the first."""
        with self._closing:
            for lesson in list(self.lessons.values()):
                lesson.stop()
            self.drop_probe()
            with self._lock:
                active = self._active
                self._active = None
            patience_s = JOB_STOP_TIMEOUT_S if isinstance(active, TorchrunRun) else STOP_TIMEOUT_S
            if active is not None and not active.stop(patience_s):
                log.warning("run %s did not stop in time", active.folder.name)
                active.end_with_server()
            self.sweeps.close(STOP_TIMEOUT_S)
            self.machine.close()
            for source in self.sources:
                source.close()

    def _find_devices(self) -> None:
        try:
            found = importlib.import_module("trainer.training.devices")
            devices = Devices(found.list_devices(), found.cuda_reason())
        except Exception as error:  # a broken torch must not take recorded runs from the page
            log.warning("devices could not be listed", exc_info=True)
            reason = f"PyTorch could not be loaded ({error}). Install it again, then restart"
            total = psutil.virtual_memory().total
            cpu = TrainDevice(id="cpu", name="CPU", memory_total=total, reason=reason)
            devices = Devices([cpu], f"{reason}.")
        self._devices.set_result(devices)
        # Imported objects stay: without a freeze, full collections would walk a million objects.
        gc.freeze()


@st.cache_resource(show_spinner=False)
def get() -> Services:
    """Return the server's services, with the runs of STEPSCOPE_RUNS and STEPSCOPE_SOURCES."""
    found = sources_from_environment()
    folders = [source for source in found if isinstance(source, Path)]
    sources = [RemoteSource(source) for source in found if not isinstance(source, Path)]
    services = Services(runs_root(), PROJECT / "examples", folders, sources)
    atexit.register(services.close)
    for source in sources:
        source.start()
    return services


@asynccontextmanager
async def lifespan(_app: object) -> AsyncIterator[None]:
    """Stop the run and flush its data when the server ends (SIGTERM runs no atexit)."""
    services = get()
    over = threading.Event()
    _end_on_signals(services, over)
    # Set by `stepscope.show()` only: standard input is a pipe whose other end the notebook has.
    if "STEPSCOPE_END_WITH_STDIN" in os.environ:
        call_at_end_of(0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    crashes = CrashWatch(services.run_list)
    crashes.start()
    yield
    crashes.close()
    await asyncio.to_thread(services.close)
    over.set()


def _end_on_signals(services: Services, over: threading.Event) -> None:
    """Make SIGTERM and SIGINT stop the run at once and end the process despite open requests.

    uvicorn would wait for every open request before it ends the lifespan, which sets `over`.
    """

    def end(number: int) -> None:
        try:
            services.close()
        finally:
            if not over.wait(CLIENTS_S):
                log.warning("open client connections were closed")
                with contextlib.suppress(OSError):  # no exit that runs `finally` follows
                    withdraw_server(st.get_option("server.port"))
                os._exit(128 + number)

    def handle(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=end, args=(number,), name="stepscope-end", daemon=True).start()
        former = formers[signal.Signals(number)]
        if callable(former):
            former(number, frame)

    if threading.current_thread() is threading.main_thread():
        numbers = (signal.SIGTERM, signal.SIGINT)
        formers = {number: signal.signal(number, handle) for number in numbers}
