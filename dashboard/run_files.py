"""Files of a run folder, which other users may have written."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from stepscope.common.files import open_regular_file, read_regular_file, read_tail
from stepscope.common.formatting import format_bytes, terminal_text
from stepscope.profiling import summary_name, trace_name
from stepscope.profiling.summary import MAX_BYTES, ProfileSummary, parse

TAIL_BYTES = 20_000
DOWNLOAD_LIMIT = 256 * 2**20  # Bytes: Streamlit holds a download in the memory of this process.
MAX_PROFILES = 500  # Of all ranks.
MAX_LISTED = 100

_PROFILE = re.compile(
    r"profile-step-([1-9]\d{0,15}|0)-([1-9]\d{0,15}|0)(?:\.rank([1-9]\d{0,5}))?\.summary\.json"
)


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A memory snapshot of a run."""

    path: Path
    size: int

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True)
class ProfileFiles:
    """A profile of the steps `first` to `last`; `trace_size` in bytes, None without a trace."""

    first: int
    last: int
    trace_size: int | None
    number: int = 0  # Of the process in the folder, 0 for the first or only one.

    @property
    def trace(self) -> str:
        return trace_name(self.first, self.last, self.number)

    @property
    def summary(self) -> str:
        return summary_name(self.first, self.last, self.number)


def snapshots(folder: Path) -> list[SnapshotFile]:
    """Return at most MAX_LISTED snapshots of a run, the newest first; links are ignored."""
    found = [
        (-modified, SnapshotFile(folder / name, size))
        for name, (size, modified) in _plain_files(folder).items()
        if name.startswith("snapshot-") and name.endswith(".pickle") and name.isprintable()
    ]
    return [file for _, file in sorted(found, key=lambda one: one[0])[:MAX_LISTED]]


def profiles(folder: Path) -> tuple[ProfileFiles, ...]:
    """Return the profiles of a run by steps, the latest first, then by rank."""
    files = _plain_files(folder)
    found = []
    for name in files:
        matched = _PROFILE.fullmatch(name)
        if matched is not None:
            first, last, number = (int(part or 0) for part in matched.groups())
            trace_size, _ = files.get(trace_name(first, last, number), (None, 0))
            found.append(ProfileFiles(first, last, trace_size, number))
    found.sort(key=lambda made: (-made.last, -made.first, made.number))
    return tuple(found[:MAX_PROFILES])


def profile_summary(folder: Path, profile: ProfileFiles) -> ProfileSummary:
    """Return the summary of a profile. Raises OSError, ValueError for an invalid file."""
    content = read_regular_file(folder / profile.summary, MAX_BYTES)
    try:
        return parse(content)
    except ValueError as error:
        raise ValueError(f"{profile.summary}: {error}. Profile again.") from error


def too_large_to_download(path: Path, size: int) -> str | None:
    """Return why a file of `size` bytes is not offered, with its path; None if it is."""
    if size <= DOWNLOAD_LIMIT:
        return None
    return (
        f"{path.name} ({format_bytes(size)}) is too large to download here, more than "
        f"{format_bytes(DOWNLOAD_LIMIT)}. Copy it from {path.absolute()}"
    )


def file_content(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError, ValueError if it is too large."""
    with open(open_regular_file(path), "rb") as file:
        refused = too_large_to_download(path, os.fstat(file.fileno()).st_size)
        if refused is not None:
            raise ValueError(refused)
        return file.read(DOWNLOAD_LIMIT)


def tail(path: Path, limit: int = TAIL_BYTES) -> str | None:
    """Return the end of a text file as a terminal would show it; None if it cannot be read."""
    try:
        text = read_tail(path, limit)
        size = path.stat().st_size
    except OSError:
        return None
    if size > limit:
        text = text[text.find("\n") + 1 :]  # the first line is cut
    return terminal_text(text)


def _plain_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size in bytes and modification time in ns of the regular files, by name."""
    files = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                state = entry.stat(follow_symlinks=False)
                files[entry.name] = (state.st_size, state.st_mtime_ns)
    return files
