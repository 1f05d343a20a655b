"""The parts that a memory ledger can have, in words, and what it says where it cannot tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Place(StrEnum):
    """Whose memory is divided: that of the GPU that the run trains on, or the host's."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Category:
    """What a part of the ledger is: `color` names its color, `help` is one sentence, `short` a
    label for where there is little room."""

    key: str
    label: str
    color: str
    help: str
    short: str = ""


TENSORS = ("memory/parameters", "memory/optimizer_state", "memory/gradients")
"""The metrics of what holds still among the tensors, in the order in which they are believed."""

_OPTIMIZER_STATE = Category(
    "optimizer_state",
    "optimizer state",
    "ledger_optimizer",
    "Tensors that the optimizers keep, such as Adam's two moments.",
    "optimizer",
)
_GRADIENTS = Category(
    "gradients",
    "gradients",
    "ledger_gradients",
    "The parameters' gradients that are held between two steps.",
)
_PARAMETERS = Category(
    "parameters",
    "parameters",
    "ledger_parameters",
    "The weights that the optimizers update, each storage once.",
)

_OF_A_DEVICE = (
    Category("free", "free", "ledger_free", "Device memory that nobody uses."),
    Category(
        "driver",
        "driver reserve",
        "ledger_driver",
        "Device memory that the driver keeps for itself.",
        "driver",
    ),
    Category(
        "others",
        "other processes",
        "ledger_others",
        "Device memory of all processes but this one, as the driver counts it.",
        "others",
    ),
    Category(
        "unnamed",
        "not attributed",
        "ledger_unnamed",
        "Device memory in use that the driver counts for no process it names: processes of other "
        "containers or users, graphics, the driver itself.",
    ),
    Category(
        "elsewhere",
        "outside PyTorch",
        "ledger_elsewhere",
        "Device memory in use that PyTorch's allocator of this process does not hold: its CUDA "
        "context and libraries, and all processes that are not shown apart.",
    ),
    Category(
        "outside",
        "this process outside PyTorch",
        "ledger_outside",
        "What the driver counts for this process beyond PyTorch's reserve: the CUDA context, "
        "loaded kernels, libraries such as NCCL and cuBLAS.",
        "context",
    ),
    Category(
        "process",
        "this process",
        "ledger_whole",
        "All device memory of this process; what PyTorch holds of it is not known.",
    ),
    Category(
        "used",
        "in use, not told apart",
        "ledger_used",
        "Device memory in use, without word of who uses it.",
    ),
    Category(
        "split",
        "cached, split",
        "ledger_split",
        "Free parts of cached blocks that also hold tensors: fragmentation, which Empty cache "
        "cannot return.",
        "split",
    ),
    Category(
        "cached",
        "cached, returnable",
        "ledger_cached",
        "Whole cached blocks without a tensor: reused for the next ones, returned by Empty cache.",
        "cached",
    ),
    Category(
        "cache",
        "cached",
        "ledger_cached",
        "Reserved by PyTorch and not allocated to a tensor now.",
    ),
    Category(
        "activations",
        "activations and the rest",
        "ledger_activations",
        "Allocated tensors that are neither parameters, gradients nor optimizer state: "
        "activations, batches, buffers, temporary results.",
        "activations",
    ),
    _OPTIMIZER_STATE,
    _GRADIENTS,
    _PARAMETERS,
    Category(
        "allocated",
        "allocated",
        "ledger_whole",
        "Tensors in PyTorch's allocator, all kinds together.",
    ),
)
_OF_THE_HOST = (
    Category(
        "free",
        "available",
        "ledger_free",
        "Host memory that a program can have at once: free, or cache that the system gives up.",
    ),
    Category(
        "others",
        "other processes and the system",
        "ledger_others",
        "Host memory in use by all but this process and its workers.",
        "others",
    ),
    Category(
        "elsewhere",
        "outside this process",
        "ledger_elsewhere",
        "Host memory in use by all but this process; its workers, if it has any, are in it.",
    ),
    Category(
        "used",
        "in use, not told apart",
        "ledger_used",
        "Host memory in use, without word of who uses it.",
    ),
    Category(
        "workers",
        "its workers",
        "ledger_workers",
        "Resident memory of the processes that this one has started, such as data-loading workers; "
        "pages shared with this process count again.",
        "workers",
    ),
    Category(
        "rest",
        "rest of this process",
        "ledger_activations",
        "Resident memory of this process beside the other parts: activations, data, Python and its "
        "libraries, memory kept for reuse.",
        "rest",
    ),
    _OPTIMIZER_STATE,
    _GRADIENTS,
    _PARAMETERS,
    Category(
        "process",
        "this process",
        "ledger_whole",
        "Resident memory of this process, all kinds together.",
    ),
)
CATEGORIES: Mapping[Place, tuple[Category, ...]] = {
    Place.DEVICE: _OF_A_DEVICE,
    Place.HOST: _OF_THE_HOST,
}
"""Every part that there can be, in the order of table and area, top to bottom. Of those that stand
for each other (such as `allocated` for four parts) a moment has one or the others, never both."""

NOT_RECORDED = "this run has not recorded it"
"""The reason where run.json gives none."""


def notes(parts: Mapping[str, int], place: Place, missing: Mapping[str, str]) -> tuple[str, ...]:
    """Say what could not be told apart, and why; `missing` has the reasons by metric."""
    said = []
    for note in _NOTES[place]:
        if all(key in parts for key in note.present) and note.absent not in parts:
            reason = next((missing[key] for key in note.keys if missing.get(key)), NOT_RECORDED)
            said.append(f"{note.sentence}: {reason.rstrip('.')}.")
    return tuple(said)


@dataclass(frozen=True, slots=True)
class _Note:
    """Said of a ledger that has the parts `present` and lacks `absent`; `keys` are the metrics
    whose absence is the reason."""

    sentence: str
    keys: tuple[str, ...]
    present: tuple[str, ...] = ()
    absent: str | None = None


_NOT_SPLIT = "is not split into parameters, gradients, optimizer state and the rest"
_NOTES: Mapping[Place, tuple[_Note, ...]] = {
    Place.DEVICE: (
        _Note(
            "Only what PyTorch has reserved is shown; free memory and what others use is not known",
            ("gpu/mem_used", "gpu/mem_total"),
            absent="free",
        ),
        _Note(
            "The driver's own reserve cannot be told apart from what is in use",
            ("gpu/mem_reserved",),
            ("free",),
            absent="driver",
        ),
        _Note(
            "Other processes and this one outside PyTorch cannot be told apart",
            ("memory/process_used", "gpu/mem_others"),
            ("elsewhere",),
            absent="others",
        ),
        _Note(
            "This process outside PyTorch and memory of no named process cannot be told apart",
            ("memory/process_used",),
            ("elsewhere", "others"),
        ),
        _Note(
            "Who has the memory outside of this process is not known",
            ("gpu/mem_others",),
            ("unnamed",),
            absent="others",
        ),
        _Note(
            "What PyTorch holds of this process's memory is not known",
            ("memory/reserved",),
            ("process",),
        ),
        _Note(
            "What is in use cannot be told apart",
            ("memory/process_used", "memory/reserved"),
            ("used",),
        ),
        _Note(
            "Cached memory is not split into what Empty cache returns and what it cannot",
            ("memory/inactive_split",),
            ("cache",),
        ),
        _Note(f"Allocated memory {_NOT_SPLIT}", TENSORS, ("allocated",)),
    ),
    Place.HOST: (
        _Note(
            "Only this process is shown; the host's own memory is not known",
            ("host/mem_used", "host/mem_total"),
            absent="free",
        ),
        _Note("What is in use cannot be told apart", ("process/rss",), ("used",)),
        _Note(
            "Workers and other processes cannot be told apart",
            ("process/children_rss",),
            ("elsewhere",),
        ),
        _Note(f"This process's memory {_NOT_SPLIT}", TENSORS, ("process",)),
    ),
}
