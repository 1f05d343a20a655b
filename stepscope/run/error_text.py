"""Find the line of an error that matters, and what to do about known errors. Pure."""

from __future__ import annotations

import re
from pathlib import Path

from stepscope.common.formatting import summary_line, terminal_text
from stepscope.common.json_values import to_text
from stepscope.common.stack_phases import is_own_file

MAX_CHARS = 300
_CAUGHT = re.compile(r"Caught \w+ (in .+)\.\n")  # torch's, before the traceback of a worker
_FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_NCCLS_CAUSE = "Last error:\n"
_REMEDIES = {
    re.compile("device-side assert triggered"): (
        "An index or a class label is out of range: CUDA_LAUNCH_BLOCKING=1, or one batch on the "
        "CPU, shows where."
    ),
    re.compile("Cannot re-initialize CUDA in forked subprocess"): (
        "Make no CUDA calls in the Dataset, or start its workers by spawn: "
        'DataLoader(multiprocessing_context="spawn").'
    ),
    re.compile("signal: Bus error|file </torch_.*No space left|out of shared memory"): (
        "/dev/shm is full: use a larger one (docker run --shm-size=8g), fewer workers or smaller "
        "batches."
    ),
    re.compile("Expected to have finished reduction in the prior iteration"): (
        "Some parameters got no gradient: use DistributedDataParallel(find_unused_parameters=True) "
        "or remove them (TORCH_DISTRIBUTED_DEBUG=DETAIL names them)."
    ),
    re.compile("Duplicate GPU detected"): (
        'Give each rank its own GPU: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])).'
    ),
}


def text_of(value: object) -> str:
    """Return an exception's text without colors."""
    return terminal_text(to_text(value))


def known_error(error: BaseException) -> BaseException:
    """Return the error, or the one of its causes that has a remedy."""
    cause: BaseException | None = error
    while cause is not None:
        if remedy_for(text_of(cause)) is not None:
            return cause
        cause = cause.__cause__
    return error


def remedy_for(text: str) -> str | None:
    """Return what to do about a known error; None for any other."""
    return next((remedy for error, remedy in _REMEDIES.items() if error.search(text)), None)


def split_remedy(reason: str) -> tuple[str, str | None]:
    """Return a reason without its remedy, and the remedy of `describe_error` if any."""
    for remedy in _REMEDIES.values():
        if reason.endswith(remedy):
            return reason.removesuffix(remedy).rstrip(), remedy
    return reason, None


def describe_error(error: BaseException) -> str:
    """Return the line of an error that matters, with its type, and the remedy of a known error."""
    error = known_error(error)
    text = text_of(error)
    caught = _CAUGHT.match(text)
    if caught:
        line = _line_of_worker(text, caught[1])
    else:
        found = summary_line(text.partition(_NCCLS_CAUSE)[2]) or summary_line(text)
        line = ": ".join(filter(None, (type(error).__name__, found[:MAX_CHARS])))
    remedy = remedy_for(text)
    return line if remedy is None else f"{line.rstrip('. ')}. {remedy}"


def _line_of_worker(text: str, where: str) -> str:
    """Return the error in a worker's traceback, with the innermost frame of the user's files."""
    frames = list(_FRAME.finditer(text))
    after = text[frames[-1].end() :].splitlines() if frames else []
    lines = [line for line in after if line and not line[0].isspace()]
    named = (summary_line("\n".join(lines)) or summary_line(text))[:MAX_CHARS]
    own = next((frame for frame in reversed(frames) if is_own_file(frame[1])), None)
    place = "" if own is None else f", {Path(own[1]).name}:{own[2]} in {own[3]}"
    return f"{named}{place} ({where.removeprefix('in ')})"
