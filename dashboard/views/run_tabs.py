"""The tabs Logs, Details, Ranks and Profile of a run."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard import services
from dashboard.charts.run_view import run_content, run_kind
from dashboard.controls import sidebar as controls
from dashboard.controls.actions import supported_commands
from dashboard.format import button, escape_markdown, note, pick
from dashboard.ranks.job_ranks import read_member
from dashboard.run_files import ProfileFiles, file_content, profile_summary, profiles, tail
from dashboard.views import parts
from dashboard.views.live_panel import APPLIED, ERROR
from dashboard.views.run_ranks import rank_overview
from stepscope.common.config_issue import ConfigError
from stepscope.common.files import modified_ns
from stepscope.common.formatting import format_bytes
from stepscope.compare.reports import run_report
from stepscope.diagnosis.code_time import TABLE, LineShare, line_shares, table_note
from stepscope.profiling.summary import ProfileSummary
from stepscope.run import RunInfo, RunKind, rank_file, read_metadata
from stepscope.run.rank_info import find_rank, rank_numbers
from stepscope.session.training_facts import read_facts
from stepscope.settings.setting import AppliedSetting, applied_settings
from stepscope.store.recorder import CommandName
from trainer.config import RunConfig

OUTPUT = "output.log"
RANK_LOGS = (OUTPUT, "worker.log", "traceback.txt")
MAX_CHECKPOINTS = 50
MAX_RANKS = 256
MAX_JSON_BYTES = 1_000_000  # of a run.json, which other users may have written
NO_CUDA = (
    "No CUDA kernels were recorded: these steps launched none, or another profiler, such as Nsight "
    "Systems, had exclusive access."
)
TIME = "%.3f ms"
MEMORY = "%.2f MiB"
US_PER_MS = 1000.0
MIB = 2.0**20
NET = "Net memory: allocated minus freed by the operator itself."
COLUMNS = {
    "Name": parts.text(
        pinned=True, width="large", help="PyTorch's name; aten:: is its core tensor library."
    ),
    "Kind": parts.text(
        help="An operator, a range (a named part of the step, with the operators in it), or a "
        "CUDA kernel, whose time its operator has, too."
    ),
    "Calls": parts.number(format="localized", help="In all profiled steps."),
    "CUDA self": parts.number(format=TIME, help="Time of kernels launched by the operator itself."),
    "CUDA total": parts.number(format=TIME, help="Including child operators."),
    "CPU self": parts.number(
        format=TIME, help="Time in the operator itself, in all profiled steps."
    ),
    "CPU total": parts.number(format=TIME, help="Including child operators."),
    "CUDA memory": parts.number(format=MEMORY, help=NET),
    "CPU memory": parts.number(format=MEMORY, help=NET),
}
PERFETTO = (
    "Open the trace at [ui.perfetto.dev](https://ui.perfetto.dev) with *Open trace file*; it "
    "stays in your browser."
)
_TABLES = {"Settings": "config", "Slurm job": "slurm", "Environment": "environment"}
_HIDDEN = {"capabilities", "fit"}
_NO_OUTPUT = {
    RunKind.INIT: "The output of a script with stepscope.init is not recorded. See its terminal.",
}


def logs_tab(run: RunInfo) -> None:
    """Draw the traceback and the output of a run."""
    rank = f" of rank {run.cause_rank}" if run.world_size > 1 else ""
    files = {
        rank_file("traceback.txt", run.cause): f"Traceback{rank}",
        "worker.log": "Training process output",
    }
    if run.cause:
        files[rank_file("worker.log", run.cause)] = f"Output{rank}"
    drawn = False
    for name, title in files.items():
        content = (tail(run.folder / name) or "").strip()
        if content:
            drawn = True
            with st.expander(title, icon=":material/terminal:", expanded="Traceback" in title):
                st.code(content, language=None, wrap_lines=True)
    if os.path.exists(run.folder / OUTPUT):
        _output(run.folder)
    elif not drawn:
        st.caption(_NO_OUTPUT.get(run_kind(run), "The run has printed nothing."))


@st.fragment
def _output(folder: Path) -> None:
    """Draw the end of the script's output, which a button reads again."""
    with st.expander("Script output", icon=":material/terminal:", expanded=True):
        about = "Reload the last 20 kB."
        button("Refresh", "refresh", "refresh_output", about, type="tertiary")
        content = tail(folder / OUTPUT)
        if content is None:
            st.caption("The output file cannot be read.")
        elif not content.strip():
            st.caption("No output yet.")
        else:
            parts.output(content)


def details_tab(run: RunInfo) -> None:
    """Draw the command, checkpoints, settings and environment of a run."""
    values = run.run_json
    if script := values.get("script"):
        given = script.get("arguments")
        arguments = map(str, given if isinstance(given, list) else [])
        _code("Script", shlex.join([str(script.get("path")), *arguments]))
        _code("Working directory", str(script.get("cwd")))
    if (git := read_metadata(run).git) is not None:
        _code("Commit", git.text)
    if run_kind(run) is RunKind.TRAINER and not run.status.live:
        _checkpoints(run)
    for title, name in _TABLES.items():
        if shown := values.get(name):
            _table(title, shown)
    if applied := applied_settings(values):
        _settings(applied)
    st.markdown("#### Export")
    parts.report_button(functools.partial(run_report, [run]), run.id, "report")
    st.code(_export_command(run), language=None, wrap_lines=True)
    with st.expander("All recorded properties (run.json)", icon=":material/data_object:"):
        _properties(values, _HIDDEN)


def _settings(applied: Sequence[AppliedSetting]) -> None:
    """Draw the settings of `stepscope watch --with`, with the evidence and the lines of code."""
    st.markdown("#### Applied settings")
    for one in applied:
        state = escape_markdown(f"{one.state}: {one.text}")
        st.markdown(f"**{escape_markdown(one.name)}** {state}")
        if one.lines:
            st.code("\n".join(one.lines), language="python", wrap_lines=True)


def _properties(values: Mapping[str, Any], hidden: set[str], *, expanded: bool = True) -> None:
    shown = {name: value for name, value in values.items() if name not in hidden}
    size = len(json.dumps(shown))
    if size > MAX_JSON_BYTES:
        st.caption(f"Too large to show ({format_bytes(size)}): open the file in the run folder.")
    else:
        st.json(shown, expanded=expanded)


def _export_command(run: RunInfo) -> str:
    listed = run.folder.parent == services.get().runs
    return f"stepscope export {run.id if listed else shlex.quote(str(run.folder))} --format csv"


def _code(title: str, content: str) -> None:
    st.caption(title)
    st.code(content, language=None, wrap_lines=True)


def _table(title: str, values: Mapping[str, Any]) -> None:
    shown = {name: "n/a" if value is None else value for name, value in values.items()}
    if values.get("commit") is None:
        shown.pop("commit", None)  # that of a script is above
    rows = [
        {"Name": name, "Value": value if isinstance(value, str) else json.dumps(value)}
        for name, value in shown.items()
    ]
    st.markdown(f"#### {title}")
    wide = {"Name": parts.text(width="medium"), "Value": parts.text(width="large")}
    parts.table(rows, wide, f"details_{title.lower()}", title, height="content", width="content")


def _checkpoints(run: RunInfo) -> None:
    files = sorted(run.folder.glob("*.pt"))
    if not files:
        return
    st.markdown("#### Checkpoints")
    with st.container(horizontal=True, key="checkpoints"):
        for path in files[:MAX_CHECKPOINTS]:
            with contextlib.suppress(OSError):  # deleted meanwhile
                parts.download(
                    f"Download {path.name}",
                    functools.partial(file_content, path),
                    f"{run.id}-{path.name}",
                    f"checkpoint_{path.name}",
                    'The weights are torch.load(..., weights_only=True)["model"].',
                    file=(path, path.stat().st_size),
                )
        about = "Put this run's settings and its last checkpoint into the sidebar of Start run."
        runs = services.get().runs
        refused = None
        if run.folder.parent != runs:
            refused = f"A run can only be resumed from {runs}. Copy its folder there."
        button(
            "Resume in a new run",
            "resume",
            "resume_run",
            about,
            refused,
            on_click=_resume,
            args=(run,),
        )


def _resume(run: RunInfo) -> None:
    saved = (*run.folder.glob("last.pt"), *run.folder.glob("step-*.pt"))  # best.pt may be old
    newest = max(saved, key=modified_ns, default=run.folder / "best.pt")
    resume_from = f"{run.id}/{newest.name}"
    try:
        config = RunConfig.from_dict({**run.run_json["config"], "resume_from": resume_from})
    except (ConfigError, KeyError, TypeError) as error:
        st.session_state[ERROR] = f"This run's settings cannot be used: {error}"
        return
    controls.load(config)
    st.session_state[APPLIED] = (
        f"The sidebar has the settings of this run and continues from {resume_from} (Resume from "
        "in the Training group)."
    )


def ranks_tab(run: RunInfo) -> None:
    """Draw all ranks; of the one that the user selects its output and its properties."""
    rank_overview(run)
    with st.expander("Output and settings of a rank", icon=":material/lan:", expanded=True):
        numbers = rank_numbers(run.folder)[:MAX_RANKS]
        names = {rank_label(run.folder, number): number for number in numbers}
        label = pick("Rank", list(names), "rank_details", "Global rank of the process.")
        number = names.get(label, 0)
        logs = {name: tail(run.folder / name) for name in (rank_file(n, number) for n in RANK_LOGS)}
        printed = {name: content for name, content in logs.items() if content and content.strip()}
        for name, content in printed.items():
            st.caption(name)
            parts.output(content)
        if not printed:
            st.caption(_NO_OUTPUT.get(run_kind(run), "The rank has printed nothing."))
        command = f"{_export_command(run)} --rank {number}"
        _code("Export the metrics of this rank:", command)
        st.caption("Settings and environment")
        file = find_rank(run.folder, number)
        if file is None:
            st.caption("The rank's file cannot be read.")
        else:
            _properties(file.run_json, {*_HIDDEN, "gpu_processes"}, expanded=False)


def rank_label(folder: Path, number: int) -> str:
    """Return a rank's label, "Rank 3 · node01", which does not change during a run."""
    member = read_member(folder, number)
    return f"Rank {member.rank} · {member.host}"


@st.fragment
def profile_section(run: RunInfo) -> None:
    """Draw the chosen profile, at first the newest, or how to record one."""
    made = profiles(run.folder)
    if not made:
        how = "No profile was recorded in this run."
        if run.status.live and CommandName.PROFILE in supported_commands(run):
            how = "No profile yet. **Profile…** in the header records the next steps."
        note("speed", how)
        return
    with st.container(border=True, key="profile"):
        with st.container(horizontal=True, vertical_alignment="center", key="profile_head"):
            st.markdown("#### Profile", width="content")
            profile = _chosen(run, made)
            if profile.trace_size is not None:
                path = run.folder / profile.trace
                size = profile.trace_size
                parts.download(
                    f"Trace ({format_bytes(size)})",
                    functools.partial(file_content, path),
                    f"{run.id}-{path.name}",
                    f"trace_{profile.first}_{profile.last}_{profile.number}",
                    "Every event of these steps on a time axis, for Perfetto (ui.perfetto.dev).",
                    file=(path, size),
                    mime="application/gzip",
                )
        try:
            summary = profile_summary(run.folder, profile)
        except (OSError, ValueError) as error:
            parts.warning(f"This profile cannot be read: {error}")
            return
        parts.table(operator_rows(summary), COLUMNS, "operators", "Operators by self time")
        st.caption(" ".join(_notes(run, summary)))
        if profile.trace_size is not None:
            st.markdown(PERFETTO)


def _chosen(run: RunInfo, made: tuple[ProfileFiles, ...]) -> ProfileFiles:
    by_steps: dict[str, list[ProfileFiles]] = {}
    for profile in made:
        by_steps.setdefault(_steps(profile), []).append(profile)
    steps = pick(
        "Profile",
        by_steps.keys(),
        "chosen_profile",
        "Profiles, the newest first.",
        label_visibility="collapsed",
        width=220,
    )
    of_steps = by_steps.get(steps, made)
    if run.world_size < 2 and len(of_steps) == 1:
        return of_steps[0]
    ranks = {rank_label(run.folder, profile.number): profile for profile in of_steps}
    rank = pick(
        "Rank",
        ranks.keys(),
        "profile_rank",
        "The rank whose profile is shown.",
        label_visibility="collapsed",
        width=220,
    )
    return ranks.get(rank, of_steps[0])


def _steps(profile: ProfileFiles) -> str:
    first = profile.first
    last = profile.last
    return f"Step {first:,}" if first == last else f"Steps {first:,} to {last:,}"


def operator_rows(summary: ProfileSummary) -> list[dict[str, Any]]:
    """Return one row per name, summed over the steps: ms and MiB, of CUDA if recorded."""
    rows: list[dict[str, Any]] = []
    has_cuda_memory = any(operator.cuda_memory for operator in summary.operators)
    for operator in summary.operators:
        row: dict[str, Any] = {
            "Name": operator.name,
            "Kind": operator.kind.value,
            "Calls": operator.calls,
        }
        if summary.cuda:
            row["CUDA self"] = operator.cuda_self_us / US_PER_MS
            row["CUDA total"] = operator.cuda_total_us / US_PER_MS
        row["CPU self"] = operator.cpu_self_us / US_PER_MS
        row["CPU total"] = operator.cpu_total_us / US_PER_MS
        if has_cuda_memory:
            row["CUDA memory"] = operator.cuda_memory / MIB
        row["CPU memory"] = operator.cpu_memory / MIB
        rows.append(row)
    return rows


def _notes(run: RunInfo, summary: ProfileSummary) -> list[str]:
    steps = summary.last - summary.first + 1
    notes = [f"Sums over {steps} steps." if steps > 1 else "Of one step."]
    if summary.operators_left:
        notes.append(f"{summary.operators_left:,} smaller rows are not shown.")
    notes.append("Click a column to sort.")
    if not summary.cuda:
        on_gpu = run_content(run).has_cuda
        notes.append(NO_CUDA if on_gpu else "No CUDA kernels were recorded: the run is on a CPU.")
    return notes


REFRESH = "5s"  # Some 10 ms of the server's time, of which a training thread waits.
PERCENT = 100.0
LINE_COLUMNS = {
    "Time": st.column_config.ProgressColumn(
        min_value=0, max_value=100, format="%d%%", help="Share of the training thread's time."
    ),
    "±": parts.number(format="%d%%", help="95% interval of the share, from the number of samples."),
    "Phase": parts.text(
        help="Of the training step: data, forward, backward, optimizer; own code is what the "
        "script does between a step and the next batch."
    ),
    "Line": parts.text(width="medium", help="File and line of the script."),
    "Call": parts.text(width="large", help="The expression of this line that was executing."),
    "In": parts.text(help="The Python function that it had called; none for a function in C."),
    "Asleep": parts.number(
        format="%d%%", help="Share of this line's time in which the thread waited, without a core."
    ),
}


def code_lines(run: RunInfo) -> None:
    """Draw the table, again every few seconds while the run is live."""
    st.markdown(f"#### {TABLE}")
    st.fragment(_line_table, run_every=REFRESH if run.status.live else None)(run)


def _line_table(run: RunInfo) -> None:
    facts = read_facts(run.folder, 0)
    rows = [] if facts is None else line_shares(facts)
    if facts is None or not rows:
        note("schedule", "No samples yet: they begin with the third step.")
        return
    parts.table([_cells(row) for row in rows], LINE_COLUMNS, "code_lines", TABLE)
    st.caption(table_note(facts))


def _cells(row: LineShare) -> dict[str, Any]:
    _, phase, place, call, below = row.cells
    return {
        "Time": PERCENT * row.share,
        "±": PERCENT * row.error,
        "Phase": phase,
        "Line": place,
        "Call": call,
        "In": below,
        "Asleep": PERCENT * row.asleep,
    }
