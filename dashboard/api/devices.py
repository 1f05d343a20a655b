"""`/api/devices`: the newest reading of this machine, details and history of one GPU."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import Any

from dashboard.machine.content import details, history, machine_content
from dashboard.services import Services
from stepscope.gpu.machine_state import MachineState
from stepscope.run import RunError

Answer = dict[str, Any]


def devices_answer(server: Services, query: Mapping[str, str]) -> Answer:
    """Answer `?gpu=UUID&since=EPOCH_SECONDS`, both optional.

    Raises RunError for an unknown GPU, ValueError for a malformed time.
    """
    seen = server.machine.look()
    answer: Answer = {"now": time.time(), "trouble": seen.trouble, "machine": None, "gpu": None}
    if seen.view is None:
        return answer
    ours = server.run_processes()
    answer["machine"] = machine_content(seen.view, server.cuda_indices(), ours)
    uuid = query.get("gpu", "")
    if uuid:
        since = finite("since", query.get("since", "0"))
        answer["gpu"] = _gpu(server, seen.view, uuid, since, ours)
    return answer


def _gpu(
    server: Services, view: MachineState, uuid: str, since: float, ours: Mapping[int, str]
) -> Answer:
    device = next((device for device in view.devices if device.info.uuid == uuid), None)
    kept = server.machine.history(uuid)
    if device is None or kept is None:
        raise RunError(f"gpu: this machine has no GPU {uuid[:60]!r}. Choose another one.")
    return details(device, view.since, ours, _torchs(server, uuid), kept.seen) | {
        "history": history(kept.since(since))
    }


def _torchs(server: Services, uuid: str) -> str:
    """Return torch's name of a GPU in this server, or why it has none."""
    if not server.devices_known:
        return "unknown until torch has started"
    index = server.cuda_indices().get(uuid)
    if index is not None:
        return f"cuda:{index}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    unused = "torch does not use it here"
    return f"none: {unused if visible is None else f'CUDA_VISIBLE_DEVICES is {visible[:80]!r}'}"


def finite(name: str, text: str) -> float:
    """Return the number of a parameter. Raises ValueError."""
    value = float(text) if len(text) < 40 else math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name}: must be a finite number, got {text[:40]!r}.")
    return value
