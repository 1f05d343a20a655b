"""Metadata of a run: run.json merged with `notes.json`, the later edits of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.common.files import atomic_write, read_json
from stepscope.common.json_values import dict_of
from stepscope.run.folder import RunError
from stepscope.run.status import RunStatus

NOTES_JSON = "notes.json"
CODE_DIFF = "code.diff"
MAX_DIFF_BYTES = 2**20
MAX_NOTES_BYTES = 2**18
MAX_TAGS = 64
MAX_LABEL = 200  # characters of a name, tag or group
MAX_NOTE = 20_000  # characters

Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL)]
Tags = Annotated[tuple[Label, ...], msgspec.Meta(max_length=MAX_TAGS)]
Note = Annotated[str, msgspec.Meta(max_length=MAX_NOTE)]


class RunNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Content of notes.json. None: the value of run.json applies, and for an empty name."""

    name: Label | None = None
    tags: Tags | None = None
    group: Label | None = None
    note: Note | None = None
    pinned: bool = False


class GitState(msgspec.Struct, frozen=True):
    """State of the script's git repository; `diff` is True if the run folder has CODE_DIFF."""

    commit: Label
    branch: Label | None = None  # None: detached
    dirty: bool | None = None  # None: unknown
    diff: bool = False

    @property
    def text(self) -> str:
        """The commit with what is known about it."""
        known = (self.branch, "uncommitted changes" if self.dirty else None)
        more = ", ".join(filter(None, known))
        return f"{self.commit[:12]} ({more})" if more else self.commit[:12]


class FinalMetric(msgspec.Struct, frozen=True):
    """Last value of a metric, None if not finite, and the best if it has a direction."""

    last: float | None = None
    best: float | None = None


@dataclass(frozen=True, slots=True)
class RunMetadata:
    """Metadata of a run; edits of the user win. A missing or invalid field has its default.

    `final` has the metrics at the end of a run by key, `totals` values of the whole run: `steps`,
    `samples_per_s`, `peak_allocated`, `peak_reserved` and `peak_process` in bytes, `energy` in J.
    """

    name: str
    config: Mapping[str, Any]
    tags: tuple[str, ...] = ()
    group: str | None = None
    note: str | None = None
    pinned: bool = False
    git: GitState | None = None
    packages: Mapping[str, str] | None = None
    final: Mapping[str, FinalMetric] | None = None
    totals: Mapping[str, float] | None = None

    @property
    def is_broken(self) -> bool:
        """True if the last value of a training loss is NaN or infinite."""
        final = self.final or {}
        losses = (final[key] for key in final if key.partition(".")[0] == "train/loss")
        return any(loss.last is None for loss in losses)


def shown_status(run_status: RunStatus, metadata: RunMetadata) -> str:
    """Return the status of a run in a list: "nan" if it finished with a loss that is not finite."""
    broken = run_status is RunStatus.FINISHED and metadata.is_broken
    return "nan" if broken else run_status.value


def read_notes(folder: Path) -> RunNotes:
    """Return the edits of a run; none without the file. Raises RunError if it is unreadable."""
    try:
        return msgspec.convert(read_json(folder / NOTES_JSON, MAX_NOTES_BYTES), RunNotes)
    except FileNotFoundError:
        return RunNotes()
    except (OSError, ValueError, msgspec.ValidationError) as error:
        text = f"{NOTES_JSON} cannot be read ({error}). Correct or delete it."
        raise RunError(text) from error


def known_notes(folder: Path) -> RunNotes:
    """Return the edits of a run to show it; no edits for an unreadable file."""
    try:
        return read_notes(folder)
    except RunError:
        return RunNotes()


def edit_notes(folder: Path, **changes: Any) -> None:
    """Write these fields of RunNotes. Raises RunError, also for an unreadable file, OSError."""
    edited = msgspec.to_builtins(read_notes(folder)) | changes
    try:
        content = msgspec.json.encode(msgspec.convert(edited, RunNotes))
    except msgspec.ValidationError as error:
        raise RunError(f"{NOTES_JSON}: {error}. Use a shorter text, or fewer tags.") from error
    atomic_write(folder / NOTES_JSON, content)


def merged(run_json: Mapping[str, Any], notes: RunNotes, run_id: str) -> RunMetadata:
    """Return the metadata of run.json with the edits of the user. Pure."""
    tags = _as(list[Any], run_json.get("tags")) or []
    recorded = RunMetadata(
        name=_as(Note, run_json.get("name")) or run_id,
        config=dict_of(run_json.get("config")),
        tags=tuple(str(tag)[:MAX_LABEL] for tag in tags[:MAX_TAGS]),
        group=_as(Note, run_json.get("group")) or None,
        note=_as(Note, run_json.get("note")) or None,
        git=_as(GitState, run_json.get("git")),
        packages=_as(dict[Label, Label], run_json.get("packages")),
        final=_as(dict[str, FinalMetric], run_json.get("final")),
        totals=_as(dict[str, float], run_json.get("totals")),
    )
    edits: dict[str, Any] = {
        name: None if edit == "" else edit for name, edit in msgspec.to_builtins(notes).items()
    }
    edits["name"] = notes.name or recorded.name
    return replace(recorded, **edits)


def _as(kind: Any, value: Any) -> Any:
    """Return a JSON value as this type; None if it is of another type."""
    try:
        return None if value is None else msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None
