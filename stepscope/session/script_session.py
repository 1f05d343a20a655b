"""The session of a user's script, made by `stepscope.init` and `stepscope watch`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from stepscope.common.clock import clock
from stepscope.distributed.rendezvous import RankContext
from stepscope.gpu.source import DeviceInfo, DeviceSource, NullSource, nvml_uuid, open_source
from stepscope.recorder.recorder import Command, CommandName
from stepscope.run import RunInfo, RunKind, RunStatus, rank_json
from stepscope.run.status import RunOutcome
from stepscope.session.session import GpuEntry, Session, listed, traceback_text
from stepscope.session.stop import GRACE_S, JOB_GRACE_S, REASON, StopEscalator, keep_stopped

log = logging.getLogger(__name__)


class ScriptSession(Session):
    """One process of a script's run; sampled only with `sample`. Raises OSError or StoreError."""

    def __init__(
        self,
        place: RankContext,
        *,
        name: str,
        kind: RunKind,
        config: Mapping[str, Any] | None = None,
        sample: bool = True,
    ) -> None:
        self.world_size = place.world_size
        self._stopper = StopEscalator(
            place.folder.absolute() / rank_json(place.number),
            grace_s=GRACE_S if place.sharing == 1 else JOB_GRACE_S,
        )
        super().__init__(
            place.folder,
            name=name,
            kind=kind,
            config=config,
            rank=place.number,
            on_command=self._heard,
            ranks=place.sharing,
            # `Tracker.step` looks for commands before it counts a step, the hooks afterwards.
            lead=2 if kind is RunKind.INIT else 1,
        )
        if place.world_size > 1:
            self.open_nccl_pipe()
        self._take_place(place)
        self.oom.attach()
        try:
            self._set_up(sample, first_here=place.local_rank == 0)
        except BaseException:
            self.close(RunStatus.FAILED, "Stepscope could not set up the recording.")
            raise

    def join_job(self, place: RankContext) -> None:
        """Become a rank of a job of the script, before the first step only. Raises OSError."""
        if place.sharing > 1:
            self.recorder.join_job(place.number, place.sharing, lead=1)
            self._stopper.grace_s = JOB_GRACE_S
        self._take_place(place)

    def _take_place(self, place: RankContext) -> None:
        self.world_size = place.world_size
        self._leads_job = place.local_rank == 0 and place.world_size > 1
        self.recorder.describe(**place.described())
        if self.recorder.job is not None:
            self.recorder.job.on_withdrawn = self._withdrawn
        self._waiting = self.recorder.command_waiting

    def _set_up(self, sample: bool, *, first_here: bool) -> None:
        source = _source(sample, first_here)
        # Of a GPU in MIG mode the script can only use an instance: the first step says which one.
        whole = [gpu for gpu in source.devices() if not gpu.mig]
        gpus = map(listed, visible_gpus(whole, os.environ))
        self.sample(source, gpus, host=first_here, start=sample)
        self.readings = self.sampler.readings
        self.sampler.observers.append(self.oom.look_for_torch)
        self.parts = self.readings.parts
        self.parts.search()
        self._commands = self.answer(
            {CommandName.STOP: partial(self._stopper.at_boundary, self.recorder)}
        )
        self._profiling = self._commands.profiling
        self._at_close.callback(self._commands.close)
        self._at_close.callback(self._stopper.close)

    def boundary(self) -> float:
        """Serve the commands of the page between two steps; return the seconds.

        Returns after a pause. Stop raises what the script's own SIGINT handler raises.
        """
        if not self._waiting and not self.readings.wanted and not self._profiling.active:
            return 0.0
        if os.getpid() != self._pid:
            return 0.0
        return self._commands.serve(self._settle)

    def train_on(self, cuda_index: int | None) -> None:
        """Record where the first step ran (None: on the CPU); in the training thread, after it."""
        try:
            self.oom.attach()
            self.readings.begin(cuda_index)
            self.recorder.describe(commands=self._commands.supported_commands())
            self._describe_device(None if cuda_index is None else _gpu(cuda_index))
        except Exception as error:  # noqa: BLE001 - torch's own; a description is not worth a training
            log.warning("stepscope: the device could not be described: %s", error)
        self.recorder.set_status(RunStatus.RUNNING)

    def failed(self, outcome: RunOutcome, error: BaseException) -> RunOutcome:
        """Record the traceback of what ended the script; return the outcome, with its OOM case."""
        if outcome.failure is None or os.getpid() != self._pid:
            return outcome
        outcome = self.told_case(outcome, error)
        # Before the script's own end, which may notify other ranks, or take long.
        self.recorder.describe(failure={"ts": clock.now(), "reason": outcome.reason})
        self.note_failure(outcome, traceback_text(error), after=self._memory_left())
        return outcome

    def close(self, status: RunStatus, reason: str | None = None) -> None:
        """End the run, as stopped where Stop was asked for; a second call does nothing."""
        if os.getpid() == self._pid:
            try:
                self._at_close.close()  # first: a stop may act until then
            finally:
                if self._stopper.asked:  # whatever the script made of it
                    status, reason = RunStatus.STOPPED, REASON
                super().close(status, reason)
            if self._stopper.asked and self._leads_job:
                keep_stopped(RunInfo(self.recorder.folder, status, reason, 0.0, {}), os.environ)

    def _memory_left(self) -> dict[str, float]:
        """Return the memory after a failure, which may be a failure of the device itself."""
        try:
            return self._commands.read_memory()
        except Exception as error:  # noqa: BLE001 - it must not take the place of the script's own
            log.warning("stepscope: the memory after the failure could not be read: %s", error)
            return {}

    def _describe_device(self, gpu: GpuEntry | None) -> None:
        """Record the device that the script trains on, as torch describes it."""
        uuid = None if gpu is None else gpu["uuid"]
        self.recorder.describe(device=uuid or "cpu")
        self.describe_environment(None if gpu is None else gpu["name"])
        self.describe_link(uuid)
        self.sampler.train_on(uuid)
        if gpu is None or uuid is None:
            return
        self.recorder.describe(device_memory=gpu["memory_total"])  # a rank may sample no GPU
        if uuid.startswith("MIG-") and self._source.reason is None:
            # NVML lists no instance among its devices, but reads one by its UUID.
            self.sampler.sample_only(uuid, gpu["name"])
            self.recorder.describe(devices=[gpu])

    def _heard(self, command: Command) -> None:
        if command.name is CommandName.STOP:
            self._stopper.heard(self.recorder, command)

    def _withdrawn(self, command: Command) -> bool:
        """Stop without the other ranks where they do not agree; any other command is given up."""
        if command.name is CommandName.STOP:
            self._stopper.without_boundary(self.recorder, command)
        return command.name is CommandName.STOP

    def _settle(self) -> None:
        try:
            self.recorder.settle()
        except Exception as error:  # noqa: BLE001 - a lost device raises whatever it likes
            log.warning("stepscope: values under way could not be read from the GPU: %s", error)


def visible_gpus(gpus: Sequence[DeviceInfo], environ: Mapping[str, str]) -> list[DeviceInfo]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in NVML's order.

    Returns all GPUs for names not found, such as a MIG instance, and where CUDA's order may differ
    from NVML's: for different GPUs without PCI_BUS_ID.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(gpus)
    names = [name.strip() for name in text.split(",") if name.strip()]
    same = len({gpu.name for gpu in gpus}) <= 1 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    visible: list[DeviceInfo] = []
    for name in names:
        if name == "-1":
            break  # as CUDA does: it hides what follows
        found = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
        if name.isdecimal() and same:
            found = [gpu for gpu in gpus if gpu.nvml_index == int(name)]
        if not found:
            return list(gpus)
        visible += found
    return visible


def _source(sample: bool, first_here: bool) -> DeviceSource:
    if not sample:
        return NullSource("Sampling is switched off.")
    return open_source() if first_here else NullSource("Rank 0 of this machine samples its GPUs.")


def _gpu(cuda_index: int) -> GpuEntry:
    """Return a device as torch describes it and run.json lists it."""
    properties = sys.modules["torch"].cuda.get_device_properties(cuda_index)
    uuid = nvml_uuid(str(properties.uuid), properties.name)
    return {"uuid": uuid, "name": properties.name, "memory_total": properties.total_memory}
