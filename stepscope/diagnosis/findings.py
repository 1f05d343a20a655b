"""All findings of a run: each function in FINDERS yields those of one kind, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from stepscope.diagnosis.classify import verdicts
from stepscope.diagnosis.learning import (
    NOT_FINITE,
    LearningRecord,
    learning_diagnoses,
    read_learning,
)
from stepscope.diagnosis.results import (
    BottleneckDiagnosis,
    BottleneckKind,
    IsSettingAllowed,
    StepAverages,
)
from stepscope.diagnosis.step_window import Slowdown, find_slowdown, recent_figures
from stepscope.distributed.hangs.cases import Hang, hang_of
from stepscope.distributed.stragglers.detect import (
    StragglerFinding,
    StragglerKind,
    in_job,
    straggler_among,
)
from stepscope.distributed.stragglers.step_phases import RankStepPhases, StepPhase, recent_times
from stepscope.memory.growth import newest_growth
from stepscope.memory.oom.classify import OomAnalysis, diagnose_run
from stepscope.run import RunInfo, RunStatus, run_json_of
from stepscope.run.folder import SIGTERM, TRACEBACK_FILE, fatal_signal, rank_file
from stepscope.run.rank_info import rank_numbers, torch_rank
from stepscope.run.rank_status import RankStatus, ranks_of
from stepscope.run.status import split_remedy
from stepscope.run_setup import Recommendation, RunSetup, setting_text, setup_of
from stepscope.session.training_facts import TrainingFacts, read_facts
from stepscope.store import EventRow, StoreError, StoreReader, store_name
from stepscope.store.reader import EVERY

FAILURES = {"oom": "out-of-memory", "nan": NOT_FINITE.value}  # Findings by their events' kinds.
MAX_FINDINGS = 3  # of one rank, on what it learns and on its time


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding of a run.

    `cause` is a special case of the kind, or None. `rank` is the global rank, None for several.
    `phase` is that of a step, or None. `share` is the fraction of the time or memory that the
    finding explains, or None. `next` is a recommendation as a sentence, and `setting` its field and
    value of RunConfig, or None.
    """

    kind: str
    cause: str | None = None
    rank: int | None
    phase: str | None = None
    share: float | None = None
    text: str
    next: str | None = None
    setting: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankData:
    """Recorded data of one process of a run; no figures if its store cannot be read."""

    number: int
    run_json: Mapping[str, Any]
    figures: StepAverages = StepAverages(steps=0)
    events: tuple[EventRow, ...] = ()
    times: RankStepPhases | None = None  # Phases of its newest steps, in a job of several ranks.
    facts: TrainingFacts | None = None
    slowdown: Slowdown | None = None
    record: LearningRecord = LearningRecord()

    @property
    def setup(self) -> RunSetup:
        """How the process trains."""
        return setup_of(self.run_json, self.figures.step_time)

    def verdicts(
        self, allowed: IsSettingAllowed = lambda name, value: True
    ) -> list[BottleneckDiagnosis]:
        """Return what costs its time; `allowed` filters the recommended settings."""
        return verdicts(self.figures, self.setup, self.facts, self.slowdown, allowed)

    @property
    def learning(self) -> list[BottleneckDiagnosis]:
        """What keeps it from learning."""
        return learning_diagnoses(self.record, self.facts, self.setup)


@dataclass(frozen=True)
class RunData:
    """Input of the finders."""

    run: RunInfo
    ranks: tuple[RankData, ...]
    hang: Hang | None = None

    @cached_property
    def straggler(self) -> StragglerFinding | None:
        """The finding on the ranks' steps, computed once; None for one process."""
        times = [rank.times for rank in self.ranks if rank.times is not None]
        busy = max((rank.figures.host_cpu or 0.0 for rank in self.ranks), default=0.0)
        return straggler_among(times, self.run.run_json, busy)


def read_recorded(run: RunInfo) -> RunData:
    """Read the input of the finders from the files of all ranks."""
    ranks = tuple(read_rank(run, number) for number in rank_numbers(run.folder))
    return RunData(run, ranks, hang_of(run))


def straggler_of(run: RunInfo) -> StragglerFinding | None:
    """Return the finding on the steps of all ranks; None for one process. Raises StoreError."""
    ranks = tuple(read_rank(run, number) for number in rank_numbers(run.folder))
    return RunData(run, ranks).straggler


def findings(recorded: RunData) -> list[Finding]:
    """Return all findings, the end of the run first."""
    found = [finding for finder in FINDERS for finding in finder(recorded)]
    hang = recorded.hang
    if hang is not None and recorded.run.cause_rank in hang.waiting:
        found.sort(
            key=lambda one: one.kind != "hang"
        )  # the time-out that ended it is a consequence
    return found


def nothing_to_say(recorded: RunData) -> str:
    """Return the sentence that replaces an empty list."""
    straggler = recorded.straggler
    ranks = f" {straggler.text}" if straggler is not None else ""
    verdict = recorded.ranks[0].verdicts()[0]
    if verdict.kind is BottleneckKind.TOO_YOUNG and not recorded.run.status.live:
        reason = recorded.run.reason or "The run has fewer steps than a diagnosis needs."
        return f"No findings. {reason}"
    prefix = "" if verdict.kind is BottleneckKind.UNCLEAR else "No findings. "
    return f"{prefix}{verdict.text}{ranks}"


def end(recorded: RunData) -> Iterator[Finding]:
    """Yield the reason why a run failed or crashed, of the rank that caused it."""
    run = recorded.run
    if run.status not in (RunStatus.FAILED, RunStatus.CRASHED):
        return
    cause = next((rank for rank in recorded.ranks if rank.number == run.cause), recorded.ranks[0])
    kind = "crashed" if run.status is RunStatus.CRASHED else _failure(cause)
    short = shortage(recorded, cause) if kind in ("crashed", FAILURES["oom"]) else None
    if short is not None and short.report.ended:
        yield _out_of_memory(short, run.cause_rank)
        return
    text, remedy = split_remedy(run.reason or "The run failed and gives no reason.")
    advice = _advice(_after(kind, recorded) if remedy is None else Recommendation(remedy))
    yield Finding(kind=kind, rank=run.cause_rank, text=text, **advice)


def caught_failures(recorded: RunData) -> Iterator[Finding]:
    """Yield failed allocations that the script has caught."""
    for rank in recorded.ranks:
        short = shortage(recorded, rank)
        if short is None or short.report.ended:
            continue
        times = short.report.seen
        many = "An allocation failed" if times == 1 else f"{times:,} allocations failed"
        finding = _out_of_memory(short, _torch_rank(rank))
        yield replace(finding, text=f"{many}, caught by the script. {finding.text}")


def absent_ranks(recorded: RunData) -> Iterator[Finding]:
    """Yield ranks that never started, and ranks that crashed while others run."""
    run = recorded.run
    for rank in ranks_of(run.folder):
        gone = rank.status is RankStatus.DEAD and run.status.live
        if not gone and rank.status is not RankStatus.NEVER_STARTED:
            continue
        kind = "rank-dead" if gone else "rank-missing"
        host = rank.run_json.get("host")
        where = f" ({host})" if host else ""
        yield Finding(
            kind=kind,
            rank=rank.rank,
            text=f"Rank {rank.rank}{where}: {rank.text[:1].lower()}{rank.text[1:]}",
            next=_WORDS[kind],
        )


def diagnoses(recorded: RunData) -> Iterator[Finding]:
    """Yield what keeps each rank from learning, and what costs its time."""
    for rank in recorded.ranks:
        causes = [one for one in rank.verdicts() if one.kind.names_a_cause]
        for found in [*rank.learning, *causes][:MAX_FINDINGS]:
            if found.kind is NOT_FINITE and recorded.run.status is RunStatus.FAILED:
                continue  # a finding of `end`
            yield Finding(
                kind=found.kind.value,
                cause=found.cause,
                rank=_torch_rank(rank),
                phase=found.phase,
                share=None if found.share is None else round(found.share, 4),
                text=found.text,
                **_advice(found.next),
            )


def stragglers(recorded: RunData) -> Iterator[Finding]:
    """Yield the straggler of a job, or the wait that is common to all ranks."""
    verdict = recorded.straggler
    if verdict is None or verdict.kind is StragglerKind.NONE:
        return
    phase = verdict.phase if verdict.phase is not StepPhase.OTHER else None
    yield Finding(
        kind="straggler",
        rank=verdict.ranks[0] if verdict.ranks else None,
        phase=None if phase is None else phase.value,
        share=None if verdict.share is None else round(verdict.share, 4),
        text=verdict.text,
        next=verdict.next,
    )


def growing_memory(recorded: RunData) -> Iterator[Finding]:
    """Yield the newest growth event of each rank."""
    for rank in recorded.ranks:
        found = newest_growth(rank.events)
        if found is not None:
            yield Finding(
                kind="memory-growth", rank=_torch_rank(rank), text=found[0], next=found[1]
            )


def hangs(recorded: RunData) -> Iterator[Finding]:
    """Yield the hang of a job, now or when it ended."""
    hang = recorded.hang
    if hang is not None:
        yield Finding(kind="hang", rank=hang.rank, phase=hang.phase, text=hang.text, next=hang.next)


FINDERS: tuple[Callable[[RunData], Iterator[Finding]], ...] = (
    end,
    absent_ranks,
    hangs,
    caught_failures,
    stragglers,
    diagnoses,
    growing_memory,
)


def shortage(recorded: RunData, rank: RankData) -> OomAnalysis | None:
    """Return the analysis of a rank's failed allocations; None without a valid file."""
    try:
        return diagnose_run(recorded.run, rank.number)
    except (OSError, ValueError):
        return None


def _out_of_memory(short: OomAnalysis, rank: int) -> Finding:
    return Finding(
        kind=FAILURES["oom"],
        rank=rank,
        phase=short.report.last.phase,
        text=short.sentence,
        **_advice(next(iter(short.finding.recommendations), None)),
    )


def _advice(step: Recommendation | None) -> dict[str, Any]:
    if step is None:
        return {}
    setting = None if step.name is None else {"field": step.name, "value": step.value}
    return {"next": step.text, "setting": setting}


def _failure(rank: RankData) -> str:
    """Return the kind of a failure by its last event: a broken loss may be long past."""
    failures = [event for event in rank.events if event.kind in ("oom", "error")]
    if failures and failures[-1].kind == "oom":
        return FAILURES["oom"]
    if failures and failures[-1].text.startswith("The loss is "):
        return FAILURES["nan"]
    return "failed"


def _after(kind: str, recorded: RunData) -> Recommendation:
    setup = setup_of(recorded.run.run_json)
    field: str | None = None
    value: float = 0
    if kind == FAILURES["oom"] and setup.number("batch_size") > 1:
        field, value = "batch_size", setup.number("batch_size") // 2
    rate = setup.config.get("learning_rate")
    if kind == FAILURES["nan"] and setup.own and isinstance(rate, float) and rate > 0:
        field, value = "learning_rate", rate / 10
    killed_by = fatal_signal(recorded.run.folder, recorded.run.cause)
    if kind in ("crashed", "rank-dead") and killed_by == SIGTERM:
        text = "Check what ended it: the launcher's output, or the scheduler's limits."
        return Recommendation(text)
    if kind == "crashed" and killed_by is not None:
        return _see_files(recorded.run)  # the host's log has no more information
    if field is not None:
        shown = f"{value:.3g}" if isinstance(value, float) else value
        return Recommendation(f"Try {setting_text(field, shown)}.", name=field, value=value)
    return _see_files(recorded.run) if kind == "failed" else Recommendation(_WORDS[kind])


def _see_files(run: RunInfo) -> Recommendation:
    """Name the files of the rank that caused the end with more information."""
    paths = [run.folder / rank_file(name, run.cause) for name in (TRACEBACK_FILE, "output.log")]
    found = [path.name for path in paths if path.is_file() and path.stat().st_size]
    where = f"{' and '.join(found)} in the run folder" if found else "the script's output"
    return Recommendation(f"See {where}.")


_WORDS = {
    "out-of-memory": "Try a smaller batch.",
    "loss-not-finite": "Try a lower learning rate, or clip the gradients.",
    "crashed": "Check the host's log (dmesg) for the reason.",
    "rank-dead": "Check the log of its host, such as dmesg, for the reason.",
    "rank-missing": "Check the launcher's output on that node, and output.rankN.log.",
}


def read_rank(run: RunInfo, number: int) -> RankData:
    """Read one process of a run. Raises StoreError for the first one."""
    own = run_json_of(run, number)
    if not (run.folder / store_name(number)).is_file():
        return RankData(number=number, run_json=own)
    try:
        with StoreReader(run.folder, number) as reader:
            events = tuple(reader.events(limit=EVERY))
            facts = read_facts(run.folder, number)
            return RankData(
                number=number,
                run_json=own,
                figures=recent_figures(reader, own),
                events=events,
                times=recent_times(reader, number, own) if in_job(own) else None,
                facts=facts,
                slowdown=find_slowdown(reader, facts),
                record=read_learning(reader),
            )
    except StoreError:
        if number == 0:
            raise
        return RankData(number=number, run_json=own)  # the findings of the other ranks remain


def _torch_rank(rank: RankData) -> int:
    return torch_rank(rank.run_json, rank.number)
