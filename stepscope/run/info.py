"""Read a run: its `run.json` with the user's later edits, its status, and the cause of its end."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.common.files import atomic_write, is_own_folder, read_json
from stepscope.common.json_values import dict_of
from stepscope.run.folder import (
    SIGTERM,
    TRACEBACK_FILE,
    RunError,
    fatal_signal,
    rank_file,
    user_name,
)
from stepscope.run.rank_info import (
    UNREADABLE,
    RankInfo,
    RunVersionError,
    first_cause,
    names,
    read_rank_file,
    read_run_json,
    readable_ranks,
    required,
)
from stepscope.run.status import RunKind, RunStatus

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

GONE = "gone without a message (killed, or the machine went down)."


@dataclass(frozen=True, slots=True, repr=False)
class RunInfo:
    """Content of `run.json` and the present status; `run_json` is the whole file."""

    folder: Path
    status: RunStatus
    reason: str | None
    heartbeat_age_s: float
    run_json: dict[str, Any]
    cause: int = 0  # folder rank that `reason` is about
    cause_rank: int = 0  # global rank of `cause`

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def created(self) -> float:
        """Start of the run in epoch seconds: time 0 of its charts."""
        return float(self.run_json["created"])

    @property
    def ended(self) -> float | None:
        """End of the run in epoch seconds; None if run.json has none."""
        return self.run_json.get("ended")

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return int(self.run_json.get("world_size") or 1)

    def __repr__(self) -> str:
        return f"RunInfo({self.id!r}, {self.status}, step {self.run_json.get('step', 0)})"


def is_local(run: RunInfo) -> bool:
    """Return True unless another host writes this run."""
    return "mirror" not in run.run_json and run.run_json.get("host") == socket.gethostname()


def is_own(run: RunInfo) -> bool:
    """Return True for a run of this host and user, whose processes and files are its own."""
    user = run.run_json.get("user", user_name())
    return is_local(run) and user == user_name() and is_own_folder(run.folder)


def read_run(folder: Path) -> RunInfo:
    """Return run metadata and the present status. Raises RunError for a corrupt file.

    A run of several ranks is live as long as rank 0, and ends as the rank that caused its end.
    """
    try:
        own = read_rank_file(folder, 0)
        required(own.run_json, "created")
    except OSError as error:
        raise RunError(f"{folder.name}: cannot read run.json ({error.strerror}).") from error
    except RunVersionError as error:
        raise RunError(f"{folder.name}: {error}") from error
    except UNREADABLE as error:
        text = f"run.json is not a Stepscope run ({error}). Delete the folder or restore the file."
        raise RunError(f"{folder.name}: {text}") from error
    if name := known_notes(folder).name:
        own.run_json["name"] = name
    status, reason, number, rank = own.status, own.run_json.get("reason"), own.number, own.rank
    if status is RunStatus.CRASHED:
        process = "The training process"
        reason = _crashed(folder, own.run_json, 0, process, f"{process} is")
    if (own.run_json.get("world_size") or 1) != 1 and not status.live:
        status, reason, cause = _end_of_all(folder, [own, *readable_ranks(folder, 1)], reason)
        number, rank = cause.number, cause.rank
    return RunInfo(folder, status, reason, own.age_s, own.run_json, number, rank)


def read_metadata(run: RunInfo) -> RunMetadata:
    """Return the metadata of a run, live or ended; reads `notes.json` only."""
    return merged(run.run_json, known_notes(run.folder), run.id)


def run_json_of(run: RunInfo, number: int) -> dict[str, Any]:
    """Return the metadata of a rank, with the entries that only run.json has, such as settings."""
    if number == 0:
        return run.run_json
    try:
        own = read_run_json(run.folder, number)
    except UNREADABLE:
        own = {}
    return {key: run.run_json.get(key) for key in ("kind", "config", "environment")} | own


def own_ranks(run: RunInfo) -> Iterator[RankInfo]:
    """Yield the live ranks of a run whose processes are of this host and user."""
    for rank in readable_ranks(run.folder):
        has_process = rank.status.live and rank.run_json.get("pid") is not None
        if has_process and is_own(replace(run, run_json=rank.run_json)):
            yield rank


def _end_of_all(
    folder: Path, ranks: list[RankInfo], reason: str | None
) -> tuple[RunStatus, str | None, RankInfo]:
    """Return status, reason, and the rank that caused the end, of a run of several ranks."""
    causes = first_cause([end for rank in ranks if (end := rank.end())])
    if not causes:
        return ranks[0].status, reason, ranks[0]
    by_number = {rank.number: rank for rank in ranks}
    first, text = by_number[causes[0].number], causes[0].reason
    if text is None:
        gone = names(sorted(by_number[end.number].rank for end in causes), len(ranks))
        reason = _crashed(folder, ranks[0].run_json, first.number, f"Rank {first.rank}", gone)
        return RunStatus.CRASHED, reason, first
    if first.status is RunStatus.STOPPED:
        return RunStatus.STOPPED, text, first
    hosts = {str(rank.run_json.get("host")) for rank in ranks}
    where = f" ({first.run_json.get('host')})" if len(hosts) > 1 else ""
    return RunStatus.FAILED, f"Rank {first.rank}{where}: {text}", first


def _crashed(
    folder: Path, run_json: Mapping[str, Any], number: int, process: str, gone: str
) -> str:
    """Return the reason of a crash, with the fatal signal of this rank if there was one."""
    killed_by = fatal_signal(folder, number)
    if killed_by is None:
        end = f"{gone} {GONE}"
    elif killed_by == SIGTERM:
        end = f"{gone} gone, ended by SIGTERM (as by kill, a scheduler or a launcher)."
    else:
        trace = rank_file(TRACEBACK_FILE, number)
        end = f"{process} was killed by a fatal signal ({killed_by}, see {trace})."
    built_in = run_json.get("kind", RunKind.TRAINER) == RunKind.TRAINER
    if built_in and any(folder.glob("*.pt")):  # checkpoints of a script are not known
        return f"{end} What was recorded is shown; resume from the last checkpoint."
    return f"{end} What was recorded is shown."


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
