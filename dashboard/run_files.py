"""Files of a run folder, read with care: in a shared folder others have written them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from stepscope.common.files import open_regular_file, read_regular_file
from stepscope.common.formatting import format_bytes, terminal_text
from stepscope.profiling import summary_name, trace_name
from stepscope.profiling.summary import BYTES_LIMIT, ProfileSummary, parse

TAIL_BYTES = 20_000
SNAPSHOTS = 50  # Memory snapshots listed at most, the newest.

DOWNLOAD_LIMIT = 256 * 2**20  # Bytes of a file that the page offers to download.

PROFILES = 50  # Profiles listed at most, the newest; of a job one of several ranks counts once.

PROFILED_RANKS = 64  # Ranks of a profile that are listed at most, those of the lowest numbers.

_PROFILE = re.compile(r"profile-step-(\d{1,16})-(\d{1,16})(?:\.rank(\d{1,6}))?\.summary\.json")
_SNAPSHOT = re.compile(r"snapshot-[\w.-]{1,100}\.pickle")


@dataclass(frozen=True, slots=True)
class SnapshotDownload:
    """A memory snapshot that a run has written; its content is never looked at here."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class ProfileFiles:
    """A profile that a run has written, of its steps `first` to `last`."""

    first: int
    last: int
    trace_size: int | None  # Bytes of the trace; None where it is not there.
    number: int = 0  # Of the process in the folder, 0 for the first or only one.

    @property
    def trace(self) -> str:
        """The name of the trace file."""
        return trace_name(self.first, self.last, self.number)

    @property
    def summary(self) -> str:
        """The name of the file that the page shows."""
        return summary_name(self.first, self.last, self.number)


def snapshots(folder: Path) -> tuple[SnapshotDownload, ...]:
    """Return the run's newest memory snapshots by name, step 10 after step 9; a link is none."""
    sizes = _plain_files(folder, "snapshot-")
    found = [
        SnapshotDownload(name, size) for name, size in sizes.items() if _SNAPSHOT.fullmatch(name)
    ]
    return tuple(sorted(found, key=lambda snapshot: natural(snapshot.name))[-SNAPSHOTS:])


def natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts step 10 after step 9."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def profiles(folder: Path) -> tuple[ProfileFiles, ...]:
    """Return the run's profiles, the one of the latest steps first, of a job rank by rank."""
    sizes = _plain_files(folder, "profile-")
    found: dict[tuple[int, int], list[ProfileFiles]] = {}
    for name in sizes:
        matched = _PROFILE.fullmatch(name)
        if matched is not None:
            first, last, number = (int(part or 0) for part in matched.groups())
            made = ProfileFiles(first, last, sizes.get(trace_name(first, last, number)), number)
            if name == made.summary:  # not 007
                found.setdefault((last, first), []).append(made)
    newest = sorted(found, reverse=True)[:PROFILES]
    return tuple(
        made
        for steps in newest
        for made in sorted(found[steps], key=lambda each: each.number)[:PROFILED_RANKS]
    )


def profile_summary(folder: Path, profile: ProfileFiles) -> ProfileSummary:
    """Return what a profile found. Raises OSError, and ValueError for what is no summary."""
    data = read_regular_file(folder / profile.summary, BYTES_LIMIT)
    try:
        return parse(data.decode(errors="replace"))
    except ValueError as error:
        raise ValueError(f"{profile.summary}: {error}. Profile again.") from error


def profile_trace(folder: Path, profile: ProfileFiles) -> bytes:
    """Return the compressed trace of a listed profile. Raises OSError, ValueError if too large."""
    return snapshot_content(folder / profile.trace)


def too_large_to_download(path: Path, size: int) -> str | None:
    """Say where to get a file that is too large for the page; None where it is not.

    Streamlit holds a download in this process's memory, beside the training.
    """
    if size <= DOWNLOAD_LIMIT:
        return None
    return (
        f"{path.name} ({format_bytes(size)}) is too large to download here, more than "
        f"{format_bytes(DOWNLOAD_LIMIT)}. Copy it from {path.absolute()}"
    )


def snapshot_content(path: Path) -> bytes:
    """Return the content of a plain file. Raises OSError, ValueError for one that is too large."""
    with open(open_regular_file(path), "rb") as file:
        refused = too_large_to_download(path, os.fstat(file.fileno()).st_size)
        if refused is not None:
            raise ValueError(refused)
        return file.read(DOWNLOAD_LIMIT)


def tail(path: Path, limit: int = TAIL_BYTES) -> str | None:
    """Return the end of a text file as a terminal would show it; None where there is none."""
    try:
        with open(open_regular_file(path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            data = file.read(limit)
    except OSError:
        return None
    text = data.decode(errors="replace")
    if size > limit:
        text = text[text.find("\n") + 1 :]  # the first line is cut
    return terminal_text(text)


def _plain_files(folder: Path, prefix: str) -> dict[str, int]:
    """Return the sizes of the files by their names, those that begin so; no link, no folder."""
    try:
        with os.scandir(folder) as entries:
            return {
                entry.name: entry.stat(follow_symlinks=False).st_size
                for entry in entries
                if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False)
            }
    except OSError:
        return {}
