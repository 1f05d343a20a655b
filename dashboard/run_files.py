"""Files of a run folder; on a shared disk other users may have written them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from stepscope.common.files import open_regular_file, read_regular_file, read_tail
from stepscope.common.formatting import format_bytes, terminal_text
from stepscope.profiling import summary_name, trace_name
from stepscope.profiling.summary import BYTES_LIMIT, ProfileSummary, parse

TAIL_BYTES = 20_000
DOWNLOAD_LIMIT = 256 * 2**20  # Bytes: Streamlit holds a download in the memory of this process.
MAX_SNAPSHOTS = 50
MAX_PROFILES = 500  # Of all ranks.

_PROFILE = re.compile(r"profile-step-(\d{1,16})-(\d{1,16})(?:\.rank(\d{1,6}))?\.summary\.json")
_SNAPSHOT = re.compile(r"snapshot-[\w.-]{1,100}\.pickle")


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A memory snapshot; `run` is the run that recorded it, None for a file from elsewhere."""

    path: Path
    size: int
    run: str | None

    @property
    def name(self) -> str:
        """The file's name."""
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
        """The name of the trace file."""
        return trace_name(self.first, self.last, self.number)

    @property
    def summary(self) -> str:
        """The name of the summary file."""
        return summary_name(self.first, self.last, self.number)


def snapshots(folder: Path) -> list[SnapshotFile]:
    """Return the snapshots of a run, the latest step first; links are ignored."""
    found = [
        SnapshotFile(folder / name, size, folder.name)
        for name, size in _plain_files(folder, "snapshot-").items()
        if _SNAPSHOT.fullmatch(name)
    ]
    return sorted(found, key=lambda file: _natural(file.name), reverse=True)[:MAX_SNAPSHOTS]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts step 10 after step 9."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def profiles(folder: Path) -> tuple[ProfileFiles, ...]:
    """Return the profiles of a run by steps, the latest first, then by rank."""
    sizes = _plain_files(folder, "profile-")
    found = []
    for name in sizes:
        matched = _PROFILE.fullmatch(name)
        if matched is not None:
            first, last, number = (int(part or 0) for part in matched.groups())
            made = ProfileFiles(first, last, sizes.get(trace_name(first, last, number)), number)
            if name == made.summary:  # not 007
                found.append(made)
    found.sort(key=lambda made: (-made.last, -made.first, made.number))
    return tuple(found[:MAX_PROFILES])


def profile_summary(folder: Path, profile: ProfileFiles) -> ProfileSummary:
    """Return the summary of a profile. Raises OSError, ValueError for an invalid file."""
    data = read_regular_file(folder / profile.summary, BYTES_LIMIT)
    try:
        return parse(data.decode(errors="replace"))
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
        text, size = read_tail(path, limit), path.stat().st_size
    except OSError:
        return None
    if size > limit:
        text = text[text.find("\n") + 1 :]  # the first line is cut
    return terminal_text(text)


def _plain_files(folder: Path, prefix: str) -> dict[str, int]:
    """Return the sizes in bytes of the regular files whose names begin with `prefix`."""
    try:
        with os.scandir(folder) as entries:
            return {
                entry.name: entry.stat(follow_symlinks=False).st_size
                for entry in entries
                if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False)
            }
    except OSError:
        return {}
