"""What can be said about a run, as a list: each entry of FINDERS is one pure judgement of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from stepscope.bottleneck.classify import BottleneckDiagnosis, StepAverages, verdict
from stepscope.bottleneck.recommendations import setting_text
from stepscope.bottleneck.step_window import recent_figures, setup_of
from stepscope.distributed.hangs.diagnose import hang_of
from stepscope.distributed.hangs.job_state import Hang
from stepscope.distributed.stragglers.detect import StragglerKind, StragglerVerdict
from stepscope.distributed.stragglers.reader import in_job, judged_ranks, recent_times
from stepscope.distributed.stragglers.step_phases import RankStepPhases, StepPhase
from stepscope.memory.growth_detector import told_growth
from stepscope.memory.oom.reader import OomAnalysis, judged
from stepscope.run import RunInfo, RunKind, RunStatus, run_json_of
from stepscope.run.fatal_signal import fatal_signal
from stepscope.run.rank_info import rank_numbers, torch_rank
from stepscope.run.rank_status import RankState, absence, rank_states
from stepscope.store import EventRow, StoreError, StoreReader, store_name
from stepscope.store.reader import EVERY

FAILURES = {"oom": "out-of-memory", "nan": "loss-not-finite"}
"""Kinds of findings by the kinds of events that tell of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is worth knowing about a run.

    `rank` is torch's number of the process, None where no single one is meant. `phase` is the part
    of a step, None where it is not known or the finding is about the whole run. `share` is the part
    of what is to be explained that it explains, 0 to 1, None where nothing is shared out. `next` is
    a sentence on what to try; `setting` is the same as a field and a value of RunConfig, where it
    is one.
    """

    kind: str
    rank: int | None
    phase: str | None = None
    share: float | None = None
    text: str
    next: str | None = None
    setting: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankData:
    """What one process of a run has recorded; no figures where its store cannot be read."""

    number: int
    run_json: Mapping[str, Any]
    figures: StepAverages = StepAverages(steps=0)
    events: tuple[EventRow, ...] = ()
    times: RankStepPhases | None = None
    """The phases of its newest steps, in a job of several processes."""

    @property
    def verdict(self) -> BottleneckDiagnosis:
        """The verdict on its steps."""
        return verdict(self.figures, setup_of(self.run_json, self.figures.step_time))


@dataclass(frozen=True)
class RunData:
    """A run as the finders see it."""

    run: RunInfo
    ranks: tuple[RankData, ...]
    hang: Hang | None = None  # Why its ranks make no step.

    @property
    def has_steps(self) -> bool:
        """False for a recording of the machine alone."""
        return self.run.run_json.get("kind") != RunKind.RECORD

    @cached_property
    def straggler(self) -> StragglerVerdict | None:
        """What the ranks' steps say of each other; None for a process by itself.

        Judged once: it permutes the ranks some thousand times.
        """
        times = [rank.times for rank in self.ranks if rank.times is not None]
        busy = max((rank.figures.host_cpu or 0.0 for rank in self.ranks), default=0.0)
        return judged_ranks(times, self.run.run_json, busy) if self.has_steps else None


def read_recorded(run: RunInfo) -> RunData:
    """Read what the finders need from every rank's files."""
    ranks = tuple(_read_rank(run, number) for number in rank_numbers(run.folder))
    return RunData(run, ranks, hang_of(run))


def findings(recorded: RunData) -> list[Finding]:
    """Return everything that there is to say, what ended the run first."""
    return [finding for finder in FINDERS for finding in finder(recorded)]


def nothing_to_say(recorded: RunData) -> str:
    """Return the sentence in place of an empty list."""
    if not recorded.has_steps:
        return "No findings: this is a recording of the machine, without steps."
    straggler = recorded.straggler
    ranks = f" {straggler.text}" if straggler is not None else ""
    return f"No findings. {recorded.ranks[0].verdict.text}{ranks}"


def end(recorded: RunData) -> Iterator[Finding]:
    """Say what ended a run that did not end well; the rank is the one that caused it."""
    run = recorded.run
    if run.status not in (RunStatus.FAILED, RunStatus.CRASHED):
        return
    cause = next((rank for rank in recorded.ranks if rank.number == run.cause), recorded.ranks[0])
    kind = "crashed" if run.status is RunStatus.CRASHED else _failure(cause)
    short = _shortage(recorded, cause) if kind in ("crashed", FAILURES["oom"]) else None
    if short is not None and short.report.ended:
        yield _out_of_memory(short, run.cause_rank)
        return
    next_text, setting = _after(kind, recorded)
    yield Finding(
        kind=kind,
        rank=run.cause_rank,
        text=run.reason or "The run failed and gives no reason.",
        next=next_text,
        setting=setting,
    )


def caught_failures(recorded: RunData) -> Iterator[Finding]:
    """Say that allocations failed which the script has caught."""
    for rank in recorded.ranks:
        short = _shortage(recorded, rank)
        if short is None or short.report.ended:
            continue
        times = short.report.seen
        many = "An allocation failed" if times == 1 else f"{times:,} allocations failed"
        found = _out_of_memory(short, _torch_rank(rank))
        yield replace(found, text=f"{many}, caught by the script. {found.text}")


def absent_ranks(recorded: RunData) -> Iterator[Finding]:
    """Name ranks that never started, and those gone while the others still run."""
    run = recorded.run
    for standing in rank_states(run.folder):
        gone = standing.state is RankState.DEAD and run.status.live
        if not gone and standing.state is not RankState.NEVER_STARTED:
            continue
        kind = "rank-dead" if gone else "rank-missing"
        yield Finding(
            kind=kind,
            rank=standing.rank,
            text=absence([standing]) or standing.text,
            next=_WORDS[kind],
        )


def bottlenecks(recorded: RunData) -> Iterator[Finding]:
    """Say what the steps of each rank wait for, where one cause explains enough of it."""
    if not recorded.has_steps:
        return
    for rank in recorded.ranks:
        found = rank.verdict
        if not found.kind.names_a_cause:
            continue
        step = found.next
        setting = None
        if step is not None and step.name is not None:
            setting = {"field": step.name, "value": step.value}
        yield Finding(
            kind=found.kind.value,
            rank=_torch_rank(rank),
            phase=found.phase,
            share=None if found.share is None else round(found.share, 4),
            text=found.text,
            next=None if step is None else step.text,
            setting=setting,
        )


def stragglers(recorded: RunData) -> Iterator[Finding]:
    """Say which rank of a job the others wait for, or what all of them wait for."""
    found = recorded.straggler
    if found is None or found.kind is StragglerKind.NONE:
        return
    phase = found.phase if found.phase is not StepPhase.OTHER else None
    yield Finding(
        kind="straggler",
        rank=found.ranks[0] if found.ranks else None,
        phase=None if phase is None else phase.value,
        share=None if found.share is None else round(found.share, 4),
        text=found.text,
        next=found.next,
    )


def broken_losses(recorded: RunData) -> Iterator[Finding]:
    """Say that the loss of a run that goes on, or has ended otherwise, is no number any more."""
    if recorded.run.status is RunStatus.FAILED:
        return  # told by `end`, with its remedy
    for rank in recorded.ranks:
        broken = [event for event in rank.events if event.kind == "nan"]
        if broken:
            next_text, setting = _after(FAILURES["nan"], recorded)
            yield Finding(
                kind=FAILURES["nan"],
                rank=_torch_rank(rank),
                text=f"{broken[-1].text.rstrip('.')}.",
                next=next_text,
                setting=setting,
            )


def growing_memory(recorded: RunData) -> Iterator[Finding]:
    """Yield the newest growth event of each rank."""
    for rank in recorded.ranks:
        found = told_growth(rank.events)
        if found is not None:
            yield Finding(
                kind="memory-growth", rank=_torch_rank(rank), text=found[0], next=found[1]
            )


def hangs(recorded: RunData) -> Iterator[Finding]:
    """Say why a job of several ranks makes no step now, or made none when it ended."""
    found = recorded.hang
    if found is not None:
        yield Finding(
            kind="hang", rank=found.rank, phase=found.phase, text=found.text, next=found.next
        )


FINDERS: tuple[Callable[[RunData], Iterator[Finding]], ...] = (
    end,
    absent_ranks,
    hangs,
    caught_failures,
    stragglers,
    bottlenecks,
    broken_losses,
    growing_memory,
)
"""Each takes a run and gives its findings; a new kind of finding is one more of them."""


def _shortage(recorded: RunData, rank: RankData) -> OomAnalysis | None:
    """Return what a rank has captured of failed allocations; a file that is none tells nothing."""
    try:
        return judged(recorded.run, rank.number, rank.events)
    except (OSError, ValueError):
        return None


def _out_of_memory(short: OomAnalysis, rank: int) -> Finding:
    verdict, step = short.verdict, next(iter(short.verdict.next), None)
    named = None if step is None or step.name is None else step
    return Finding(
        kind=FAILURES["oom"],
        rank=rank,
        phase=short.report.last.phase,
        share=verdict.share,
        text=short.sentence,
        next=None if step is None else step.text,
        setting=None if named is None else {"field": named.name, "value": named.value},
    )


def _failure(rank: RankData) -> str:
    """Return the kind of a failure by its last event: a broken loss may be long past."""
    told = [event for event in rank.events if event.kind in ("oom", "error")]
    if told and told[-1].kind == "oom":
        return FAILURES["oom"]
    if told and told[-1].text.startswith("The loss is "):
        return FAILURES["nan"]
    return "failed"


def _after(kind: str, recorded: RunData) -> tuple[str, dict[str, Any] | None]:
    """Return what to do about an end, and the setting if it is one."""
    setup = setup_of(recorded.run.run_json)
    field: str | None = None
    value: float = 0
    if kind == FAILURES["oom"] and setup.number("batch_size") > 1:
        field, value = "batch_size", setup.number("batch_size") // 2
    rate = setup.config.get("learning_rate")
    if kind == FAILURES["nan"] and setup.own and isinstance(rate, float) and rate > 0:
        field, value = "learning_rate", rate / 10
    if kind == "crashed" and fatal_signal(recorded.run.folder, recorded.run.cause) is not None:
        return _WORDS["failed"], None  # the machine's log says nothing more
    if field is not None:
        shown = f"{value:.3g}" if isinstance(value, float) else value
        return f"Try {setting_text(field, shown)}.", {"field": field, "value": value}
    return _WORDS[kind], None


_WORDS = {
    "out-of-memory": "Try a smaller batch.",
    "loss-not-finite": "Try a lower learning rate, or clip the gradients.",
    "crashed": "Check the machine's log (dmesg) for what killed the process.",
    "rank-dead": "Look at the log of its machine, such as dmesg, for what killed the process.",
    "rank-missing": "Check the launcher's output on that node, and output.rankN.log.",
    "failed": "See traceback.txt and output.log in the run folder.",
}


def _read_rank(run: RunInfo, number: int) -> RankData:
    own = run_json_of(run, number)
    if not (run.folder / store_name(number)).is_file():
        return RankData(number=number, run_json=own)
    try:
        with StoreReader(run.folder, number) as reader:
            events = tuple(reader.events(limit=EVERY))
            return RankData(
                number=number,
                run_json=own,
                figures=recent_figures(reader, own),
                events=events,
                times=recent_times(reader, number, own) if in_job(own) else None,
            )
    except StoreError:
        if number == 0:
            raise
        return RankData(number=number, run_json=own)  # what the others say counts


def _torch_rank(rank: RankData) -> int:
    return torch_rank(rank.run_json, rank.number)
