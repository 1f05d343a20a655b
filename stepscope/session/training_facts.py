"""What a process observed of its training beside the metrics: `facts.rank<N>.json` of a run folder.

The sampler's thread replaces the file at most every WRITE_S. Readers must not trust its content.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepscope.common.files import read_regular_file

WRITE_S = 2.0
MAX_BYTES = 2**20
MAX_LINES = 200  # the lines with the most samples
MAX_PERIODS = 32


class CodeLine(msgspec.Struct, kw_only=True):
    """Samples that found the training thread in one call of the script, per period."""

    phase: str  # of a step; "" if unknown
    file: str
    line: int
    source: str  # the line of the file, without indentation
    call: str  # the expression of that line which was executing
    below: str  # the Python function that it had called; "" for none, as for a C function
    in_torch: bool  # `below` belongs to torch's computing
    before: bool = False  # in Python code up to this call, which held the GIL
    counts: list[int]
    asleep: float = 0.0  # number of samples, each by the fraction of time asleep before it


class Period(msgspec.Struct, kw_only=True):
    """A part of the run: its last step, samples of the code, and seconds of the thread."""

    step: int
    samples: int = 0
    wall_s: float = 0.0
    delay_s: float = 0.0  # ready to run, but without a core


class LoaderFacts(msgspec.Struct, kw_only=True):
    """One DataLoader; times are of the training thread, in seconds.

    `start_s` is what beginning and ending its passes took beyond the usual wait for a batch.
    """

    is_map: bool
    dataset: str
    in_memory: bool
    workers: int
    persistent: bool
    batch_size: int = 0
    batch_bytes: int = 0
    batches: int = 0
    wait_s: float = 0.0
    passes: int = 0
    start_s: float = 0.0


class Compilation(msgspec.Struct, kw_only=True):
    """One compilation by torch.compile, and the latest step when it was seen."""

    step: int
    reason: str  # why an earlier compilation did not fit; "" for a first one


class NonFinite(msgspec.Struct, kw_only=True):
    """What was not finite when the loss first was not; None if it could not be read."""

    step: int
    batch: int | None = None  # its index in its pass over the loader
    inputs: bool | None = None
    weights: bool | None = None


class LearningFacts(msgspec.Struct, kw_only=True):
    """What sampled steps of an optimizer showed. A count is one of `checks`."""

    built: str = ""  # file and line that made the optimizer
    checks: int = 0
    parameters: int = 0
    without_gradient: int = 0  # parameters that had no gradient in any check
    in_eval_mode: int = 0  # newest checks, all modules in eval mode, one with dropout or batch norm
    clear_checks: int = 0
    never_cleared: int = 0  # of `clear_checks`: the last step's gradients were still there


class TrainingFacts(msgspec.Struct, kw_only=True):
    """The content of the file."""

    periods: list[Period] = []
    lines: list[CodeLine] = []
    loaders: list[LoaderFacts] = []
    compilations: list[Compilation] = []
    compilation_count: int = 0
    learning: LearningFacts | None = None
    non_finite: NonFinite | None = None


def facts_file(folder: Path, number: int) -> Path:
    """Return the path of the facts of a folder rank."""
    return folder / f"facts.rank{number}.json"


def read_facts(folder: Path, number: int) -> TrainingFacts | None:
    """Return the facts of a folder rank; None without a valid file."""
    try:
        data = read_regular_file(facts_file(folder, number), MAX_BYTES)
        return msgspec.json.decode(data, type=TrainingFacts)
    except (OSError, ValueError, RecursionError):
        return None
