"""A run of a script that is not ours: its folder, recorder, sampler and the page's buttons.

`stepscope.init` and `stepscope watch` make one; both call `boundary` at every optimizer step.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from stepscope.diagnosis.outcome import Outcome
from stepscope.formatting import terminal_text
from stepscope.recording.recorder import Command, CommandName, Recorder
from stepscope.run import RunKind, RunStatus, new_run_folder, rank_file
from stepscope.sampling import allocator
from stepscope.sampling.allocator import Readings
from stepscope.sampling.nvml import DeviceInfo, DeviceSource, NullSource, nvml_uuid, open_source
from stepscope.sampling.sampler import Sampler
from stepscope.session.commands import CommandServer
from stepscope.session.stopping import REASON, Stopper

log = logging.getLogger(__name__)

TRACEBACK_FILE = "traceback.txt"
TRACEBACK_LIMIT = 20_000  # characters kept in the event


class ScriptMemory:
    """Memory of a training that somebody else set up; torch is found in `sys.modules`.

    `cuda_index` None means that it trains on the CPU, or has not begun.
    """

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    @property
    def on_gpu(self) -> bool:
        """Say whether training has begun on a CUDA device."""
        return self._readings.index is not None and allocator.reason() is None

    def memory(self) -> dict[str, float]:
        """Bytes by metric key; those of the process where there is no CUDA allocator."""
        if self.on_gpu:
            return self._readings.read()
        return {"process/rss": float(psutil.Process().memory_info().rss)}

    def empty_cache(self) -> None:
        """Give unused cached blocks back to the driver; waits for the device."""
        if self.on_gpu:
            sys.modules["torch"].cuda.empty_cache()

    def reset_peaks(self) -> None:
        """Start the allocator's peaks again from the current values."""
        if self.on_gpu:
            sys.modules["torch"].cuda.reset_peak_memory_stats(self._readings.index)


class LiveRun:
    """One process of one run, from its making to `close`.

    The folder is made under `runs` (STEPSCOPE_RUNS or ./runs by default), unless `folder` names
    one that exists. `rank` is the number of this process in that folder; the first process of a
    machine samples its GPUs and host. Raises OSError or StoreError where no folder can be made.
    """

    def __init__(
        self,
        *,
        name: str,
        kind: RunKind,
        runs: Path | None = None,
        folder: Path | None = None,
        config: Mapping[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        sample: bool = True,
        allocator_index: int | None = None,
        run_info: Mapping[str, Any] | None = None,
    ) -> None:
        folder = (folder or new_run_folder(runs_root(runs), name)).absolute()
        self._stopper = Stopper(folder / ("run.json" if rank == 0 else f"rank{rank}.json"))
        self._traceback = folder / rank_file(TRACEBACK_FILE, rank)
        self.recorder = Recorder(
            folder, name=name, config=config, kind=kind, rank=rank, on_command=self._heard
        )
        self._waiting = self.recorder.command_waiting
        self._pid = os.getpid()
        self._closed = False
        try:
            self._set_up(sample, allocator_index)
            self.recorder.describe(world_size=world_size, **(run_info or {}))
        except BaseException:
            self.recorder.close(RunStatus.FAILED, "Stepscope could not set up the recording.")
            raise
        if sample:
            self.sampler.start()

    def _set_up(self, sample: bool, allocator_index: int | None) -> None:
        first_here = os.environ.get("LOCAL_RANK", "0") == "0"
        self._source = _source(sample, first_here)
        # Of a GPU in MIG mode the script can only use an instance: which one, its first step tells.
        whole = [gpu for gpu in self._source.devices() if not gpu.mig]
        self._gpus = visible_gpus(whole, os.environ)
        self.sampler = Sampler(
            self.recorder,
            allocator_index=allocator_index,
            source=self._source,
            host=first_here,
            gpu_uuids=[gpu.uuid for gpu in self._gpus],
        )
        self._readings = self.sampler.readings
        self._memory = ScriptMemory(self._readings)
        self._commands = CommandServer(
            self.recorder,
            self._memory,
            readings=self._readings,
            reset_process_peak=self.sampler.reset_process_peak,
            own={CommandName.STOP: self._stop},
        )
        self.recorder.describe(
            environment=_environment(self._source),
            devices=_device_info(self._gpus),
            commands=self._commands.supported_commands(),
        )

    def boundary(self) -> float:
        """Serve the page's buttons, here and now: between two steps, in the training thread.

        Return the seconds that took, 0.0 at once when none waits; a reading for the sampler, some
        microseconds ten times a second, does not count. While paused it stays here. Stop
        acts as Ctrl-C, so it raises what the script's own SIGINT handler raises.
        """
        if not self._waiting and not self._readings.wanted:
            return 0.0
        if os.getpid() != self._pid:
            return 0.0
        return self._commands.serve(self._settle)

    def train_on(self, cuda_index: int | None) -> None:
        """Say where the first step ran (None: on the CPU): from here on the run counts as running.

        Call it in the training thread, after the script itself has started CUDA.
        """
        try:
            self._readings.begin(cuda_index)
            self.recorder.describe(
                environment=_environment(self._source), commands=self._commands.supported_commands()
            )
            if cuda_index is None:
                self.recorder.describe(device="cpu")
            else:
                self._found(_gpu(cuda_index))
        except Exception as error:  # noqa: BLE001 - torch's own; run_info are not worth a training
            log.warning("stepscope: the device could not be described: %s", error)
        self.recorder.set_status(RunStatus.RUNNING)

    def failed(self, outcome: Outcome, error: BaseException) -> None:
        """Keep the traceback of what ended the script; `close` has still to be called."""
        if outcome.failure is None or os.getpid() != self._pid:
            return
        # Before the script's own end, which may tell other ranks of it, or take long.
        self.recorder.describe(failure={"ts": time.time(), "reason": outcome.reason})
        text = terminal_text("".join(traceback.format_exception(error)))
        try:
            self._traceback.write_text(text, errors="backslashreplace")
        except OSError as problem:
            log.warning("stepscope: the traceback could not be written: %s", problem)
        self.recorder.event(
            outcome.failure,
            outcome.reason or "",
            after=self._memory_left(),
            traceback=text[-TRACEBACK_LIMIT:],
        )

    def close(self, status: RunStatus, reason: str | None = None) -> None:
        """End the run; a second call, or one in a forked child, does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._stopper.close()
        self.sampler.stop()
        self._commands.close()
        if self._stopper.asked:  # whatever the script made of it
            status, reason = RunStatus.STOPPED, REASON
        self.recorder.close(status, reason)

    def _memory_left(self) -> dict[str, float]:
        """The memory after a failure, which may be one of the device that would tell."""
        try:
            return self._memory.memory()
        except Exception as error:  # noqa: BLE001 - it must not take the place of the script's own
            log.warning("stepscope: the memory after the failure could not be read: %s", error)
            return {}

    def _found(self, gpu: dict[str, Any]) -> None:
        """Take note of the GPU that the script trains on, by what torch says of it."""
        self.recorder.describe(
            device=gpu["uuid"], environment=_environment(self._source, gpu["name"])
        )
        if gpu["uuid"].startswith("MIG-") and self._source.reason is None:
            # NVML lists no instance among its devices, but reads one by its UUID.
            self.sampler.watch(gpu["uuid"], gpu["name"])
            self.recorder.describe(devices=[gpu])

    def _heard(self, command: Command) -> None:
        if command.name is CommandName.STOP:
            self._stopper.heard(self.recorder, command)

    def _stop(self, command: Command) -> None:
        self._stopper.at_boundary(self.recorder, command)

    def _settle(self) -> None:
        try:
            self.recorder.settle()
        except Exception as error:  # noqa: BLE001 - a lost device raises whatever it likes
            log.warning("stepscope: values under way could not be read from the GPU: %s", error)


def runs_root(runs: Path | None = None) -> Path:
    """Return the absolute folder of all runs: a script may change its working directory."""
    return (runs or Path(os.environ.get("STEPSCOPE_RUNS") or "runs")).absolute()


def visible_gpus(gpus: Sequence[DeviceInfo], environ: Mapping[str, str]) -> list[DeviceInfo]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in NVML's order.

    Numbers count in CUDA's order, which is NVML's only for equal GPUs or when asked for: where it
    may differ, and for names not found (a MIG instance), all are returned.
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


def _device_info(gpus: Sequence[DeviceInfo]) -> list[dict[str, Any]]:
    return [{"uuid": gpu.uuid, "name": gpu.name, "memory_total": gpu.memory_total} for gpu in gpus]


def _environment(source: DeviceSource, gpu: str | None = None) -> dict[str, Any]:
    """Return what the run ran on; None where there is no such thing, or not yet."""
    gpus = source.devices()
    torch = sys.modules.get("torch")
    return {
        "python": platform.python_version(),
        "torch": getattr(torch, "__version__", None),
        "cuda": getattr(getattr(torch, "version", None), "cuda", None),
        "driver": gpus[0].driver_version if gpus else None,
        "gpu": gpu,
        "cores": os.cpu_count(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
    }


def _gpu(cuda_index: int) -> dict[str, Any]:
    """What torch says of a device, as the run_info of a run have it; `memory_total` in bytes."""
    properties = sys.modules["torch"].cuda.get_device_properties(cuda_index)
    uuid = nvml_uuid(str(properties.uuid), properties.name)
    return {"uuid": uuid, "name": properties.name, "memory_total": properties.total_memory}
