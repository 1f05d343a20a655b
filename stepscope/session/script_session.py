"""The session of a user's script, created by `stepscope.init` and `stepscope watch`."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.common.clock import clock
from stepscope.common.secrets import without_secrets
from stepscope.distributed.rendezvous import RankContext
from stepscope.gpu.device_info import DeviceInfo
from stepscope.gpu.source import DeviceSource, NullSource, nvml_uuid, open_source
from stepscope.host.environment import warn_if_unsupported
from stepscope.run import RunInfo, RunKind, RunStatus, is_run_id
from stepscope.run.status import RunOutcome
from stepscope.session.code_state import CodeStateReader, imported_packages
from stepscope.session.session import GpuEntry, Session, gpu_entry, listed, traceback_text
from stepscope.session.stop import GRACE_S, JOB_GRACE_S, REASON, StopSignal, keep_stopped
from stepscope.store.commands import Command, CommandName

log = logging.getLogger(__name__)


class ScriptSession(Session):
    """One process of a script's run; `sample` enables the sampler. Raises OSError or StoreError.

    `script_folder` is the folder whose git state is recorded, by rank 0.
    """

    def __init__(
        self,
        place: RankContext,
        *,
        name: str,
        kind: RunKind,
        sample: bool = True,
        script_folder: Path | None = None,
    ) -> None:
        self.world_size = place.world_size
        self.at_boundary: Callable[[], None] | None = None
        """Called at each step boundary of a trial of the lab."""
        self.optimizer_steps: int | None = None
        """Steps that the hooks have counted; None without an optimizer of torch."""
        self._is_set_up = False
        self._leads_job = place.local_rank == 0 and place.world_size > 1
        super().__init__(
            place.folder,
            name=name,
            kind=kind,
            rank=place.number,
            ranks=place.sharing,
            # `Tracker.step` takes commands before it counts a step, the hooks afterwards.
            lead=2 if kind is RunKind.INIT else 1,
        )
        recorder = self.recorder
        self._stopper = StopSignal(recorder, GRACE_S if place.sharing == 1 else JOB_GRACE_S)
        if place.world_size > 1:
            self.open_nccl_pipe()
        recorder.describe(**place.described())
        if replaced := take_replaced_run():
            recorder.describe(replaces=replaced)
            recorder.event("mark", f"Continues run {replaced}: its process became this one.")
        self.oom.attach()
        try:
            if place.number == 0 and script_folder is not None:
                code = CodeStateReader(script_folder, recorder.folder, recorder.describe)
                self._at_close.callback(code.close)
            is_first_here = place.local_rank == 0
            # Of a GPU in MIG mode the script can only use an instance, known at the first step.
            source = _source(is_first_here) if sample else NullSource("Sampling is disabled.")
            whole = [gpu for gpu in source.devices() if not gpu.mig]
            gpus = map(listed, visible_gpus(whole, os.environ))
            self._sampler = self.sample(source, gpus, host=is_first_here, start=sample)
            self.readings = self._sampler.readings
            self.parts = self.readings.parts
            self.parts.search()
            stop = {CommandName.STOP: self._stopper.at_boundary}
            self._commands = self.answer(self._sampler, stop)
            self._waiting = recorder.commands.waiting
            self._profiling = self._commands.profiling
            self._at_close.callback(self._commands.close)
            self._at_close.callback(self._stopper.close)
            self._is_set_up = True
        except BaseException:
            self.close(RunStatus.FAILED, "Stepscope could not set up the recording.")
            raise

    def announce(self, command: Command) -> None:
        """Start the grace period of a Stop."""
        super().announce(command)
        self._stopper.on_command(command)

    def runs_alone(self, command: Command) -> bool:
        """Return True for a Stop, which sends SIGINT without a common step boundary."""
        return self._stopper.without_boundary(command)

    def join_job(self, started: int, world_size: int) -> None:
        """Become rank 0 of a job before the first step. Raises OSError.

        `started` is the number of its ranks on this host. Their commands are shared once all are.
        """
        place = RankContext(self.recorder.folder, 0, 0, 0, world_size, started)
        self.recorder.describe(**place.described())
        self.world_size = world_size
        if started == world_size:
            self.share_commands(world_size, lead=1)
            self._stopper.grace_s = JOB_GRACE_S
            self._waiting = self.recorder.commands.waiting
            self.open_nccl_pipe()

    def boundary(self) -> float:
        """Execute the commands of the page between two steps; return their duration in seconds.

        Returns after a pause. Stop raises the exception of the script's SIGINT handler.
        """
        if self.at_boundary is not None:
            self.at_boundary()
        is_due = self._waiting or self.readings.wanted or self._profiling.active
        if not is_due and self._commands.snapshot is None:
            return 0.0
        if os.getpid() != self._pid:
            return 0.0
        return self._commands.serve(self.recorder.settle)

    def train_on(self, cuda_index: int | None) -> None:
        """Record the device of the first step (None: the CPU). Training thread only."""
        torch = sys.modules.get("torch")
        warn_if_unsupported(str(getattr(torch, "__version__", "")))
        try:
            self.oom.attach()
            self.readings.begin(cuda_index)
            self.recorder.describe(commands=self._commands.supported_commands())
            gpu = None if cuda_index is None else _gpu(cuda_index)
            uuid = None if gpu is None else gpu["uuid"]
            self.recorder.describe(device=uuid or "cpu", packages=imported_packages())
            self.describe_environment(None if gpu is None else gpu["name"])
            self._sampler.train_on(uuid)
            if gpu is not None:
                # Recorded here because a rank may sample no GPU.
                self.recorder.describe(device_memory=gpu["memory_total"])
                if gpu["uuid"].startswith("MIG-") and self._source.reason is None:
                    # NVML lists no instance among its devices, but reads one by its UUID.
                    self._sampler.sample_only(gpu["uuid"], gpu["name"])
                    self.recorder.describe(devices=[gpu])
        except Exception as error:  # noqa: BLE001 - an error of torch must not end a training
            log.warning("stepscope: the device could not be described: %s", error)
        self.recorder.set_status(RunStatus.RUNNING)

    def _describe_untrained(self) -> None:
        """Record the environment and the GPU memory of a script that ends before its first step."""
        torch = sys.modules.get("torch")
        if torch is None or not self._is_set_up or "device" in self.recorder.run_json:
            return
        try:
            index = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self.describe_environment(None if index is None else _gpu(index)["name"])
            if index is not None:
                self.readings.begin(index)
                self.recorder.sample(self.readings.read())
        except Exception as error:  # noqa: BLE001 - such as of a lost device
            log.warning("stepscope: the environment could not be described: %s", error)

    def failed(self, outcome: RunOutcome, error: BaseException) -> RunOutcome:
        """Record the exception that ended the script; return the outcome, with any OOM cause."""
        if outcome.failure is None or os.getpid() != self._pid:
            return outcome
        outcome = self.record_memory_failure(outcome, error)
        # Before the script's cleanup, which may notify other ranks, or take long.
        self.recorder.describe(failure={"ts": clock.now(), "reason": outcome.reason})
        memory: dict[str, float] = {}
        try:
            memory = self._commands.read_memory()
        except Exception as failure:  # noqa: BLE001 - such as a lost device
            log.warning("stepscope: the memory after the failure could not be read: %s", failure)
        self.note_failure(outcome, traceback_text(error), after=memory)
        return outcome

    def close(self, status: RunStatus, reason: str | None = None) -> None:
        """End the run, with the status `stopped` after a Stop. A second call does nothing."""
        if os.getpid() == self._pid:
            self._describe_untrained()
            try:
                self._at_close.close()  # first: a Stop may send its signal until then
            finally:
                if self._stopper.asked:  # independent of the script's exception
                    status, reason = RunStatus.STOPPED, REASON
                super().close(status, reason)
            if self._stopper.asked and self._leads_job:
                keep_stopped(RunInfo(self.recorder.folder, status, reason, 0.0, {}), os.environ)


def _source(is_first_here: bool) -> DeviceSource:
    """Return the source of the GPUs' values: one rank of a machine samples them."""
    if is_first_here:
        return open_source()
    return NullSource("Rank 0 of this machine samples its GPUs.")


def visible_gpus(gpus: Sequence[DeviceInfo], environ: Mapping[str, str]) -> list[DeviceInfo]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES makes visible, in NVML's order.

    Returns all GPUs for an unknown name, such as a MIG instance, and for an index if CUDA's order
    may differ from NVML's: for different GPU models without PCI_BUS_ID.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(gpus)
    names = [name.strip() for name in text.split(",") if name.strip()]
    same = len({gpu.name for gpu in gpus}) <= 1 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    visible: list[DeviceInfo] = []
    for name in names:
        if name == "-1":
            break  # as in CUDA: it hides all that follow
        found = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
        if name.isdecimal() and same:
            found = [gpu for gpu in gpus if gpu.nvml_index == int(name)]
        if not found:
            return list(gpus)
        visible += found
    return visible


def _gpu(cuda_index: int) -> GpuEntry:
    """Return the entry in run.json of a CUDA device, by torch's properties."""
    properties = sys.modules["torch"].cuda.get_device_properties(cuda_index)
    uuid = nvml_uuid(str(properties.uuid), properties.name)
    return gpu_entry(uuid, properties.name, properties.total_memory)


REPLACED_RUN = "STEPSCOPE_REPLACED_RUN"
"""Environment variable of the new program: the id of the run that ended."""
MAX_TEXT = 200  # characters of the new command in a reason


EndRun = Callable[[str], str | None]
"""Ends the run of this process for a reason; returns the run's id, or None if it has ended."""


def handle_exec(end: EndRun) -> None:
    """Call `end` when this process becomes another program."""
    pid = os.getpid()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.exec" and pid == os.getpid():
            _before_exec(end, *arguments)

    sys.addaudithook(audit)


def take_replaced_run() -> str | None:
    """Return the id of the run whose process became this one; None without one."""
    run_id = os.environ.pop(REPLACED_RUN, "")
    return run_id if is_run_id(run_id) else None


def _before_exec(
    end: EndRun, path: Any, arguments: Any, environment: Mapping[Any, Any] | None
) -> None:
    """End the run, and tell its id to the new program. Raises OSError."""
    try:
        # `os.execvp` tries the folders of PATH one after the other.
        if not os.path.isfile(path) or not os.access(path, os.X_OK):
            return
        named = shlex.join(without_secrets([os.fsdecode(word) for word in arguments]))[:MAX_TEXT]
        run_id = end(f"The script replaced its process by: {named}")
    except Exception as error:  # noqa: BLE001 - the script must still become the program
        log.warning("stepscope: the run could not be closed before os.exec: %s", error)
        return
    if run_id is None:  # closed before, such as in the call below
        return
    if environment is not None:
        os.execve(path, arguments, {**environment, REPLACED_RUN: run_id})
    os.environ[REPLACED_RUN] = run_id
