"""The Profile tab: the phases of a step, stacks, operators, and the trace to download."""

from __future__ import annotations

import functools
from typing import Any

import streamlit as st

from dashboard.charts.profile import MAX_NODES, flame_figure, phase_figure, rows
from dashboard.charts.run_view import run_content
from dashboard.controls.actions import supported_commands
from dashboard.format import note, pick
from dashboard.run_files import ProfileFiles, file_content, profile_summary, profiles
from dashboard.views.parts import download, number, plot, table, text, warning
from dashboard.views.run_details import rank_label
from stepscope.common.formatting import format_bytes
from stepscope.profiling.summary import ProfileSummary
from stepscope.profiling.trace_stats import FlameGraph
from stepscope.recorder.recorder import CommandName
from stepscope.run import RunInfo

NO_CUDA = (
    "No CUDA kernels were recorded: these steps launched none, or another profiler, such as Nsight "
    "Systems, had exclusive access."
)
BADGES = {"Python": "blue", "module": "green", "built-in function": "gray", "operator": "orange"}
"""Colors of `dashboard.charts.profile.KINDS`."""
TIME, MEMORY = "%.3f ms", "%.2f MiB"
NET = "Net memory: allocated minus freed by the operator itself."
COLUMNS = {
    "Operator": text(
        pinned=True, width="large", help="PyTorch's name; aten:: is its core tensor library."
    ),
    "Calls": number(format="localized", help="In all profiled steps."),
    "CUDA self": number(format=TIME, help="Time of kernels launched by the operator itself."),
    "CUDA total": number(format=TIME, help="Including child operators."),
    "CPU self": number(format=TIME, help="Time in the operator itself, in all profiled steps."),
    "CPU total": number(format=TIME, help="Including child operators."),
    "CUDA memory": number(format=MEMORY, help=NET),
    "CPU memory": number(format=MEMORY, help=NET),
}
PERFETTO = (
    "Open the trace at [ui.perfetto.dev](https://ui.perfetto.dev) with *Open trace file*; it "
    "stays in your browser."
)


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
                path, size = run.folder / profile.trace, profile.trace_size
                download(
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
            warning(f"This profile cannot be read: {error}")
            return
        st.markdown("**Parts of a step**")
        plot(phase_figure(summary), "profile_phases")
        if summary.flame.parent:
            _stacks(summary.flame)
        table(rows(summary), COLUMNS, "operators", "Operators by self time")
        st.caption(" ".join(_notes(run, summary, profile)))


def _chosen(run: RunInfo, made: tuple[ProfileFiles, ...]) -> ProfileFiles:
    by_steps: dict[str, list[ProfileFiles]] = {}
    for profile in made:
        by_steps.setdefault(_steps(profile), []).append(profile)
    narrow: Any = {"label_visibility": "collapsed", "width": 220}
    about = "Profiles, the newest first."
    steps = pick("Profile", by_steps.keys(), "chosen_profile", about, **narrow)
    of_steps = by_steps.get(steps, made)
    if run.world_size < 2 and len(of_steps) == 1:
        return of_steps[0]
    ranks = {rank_label(run.folder, profile.number): profile for profile in of_steps}
    about = "The rank whose profile is shown."
    rank = pick("Rank", ranks.keys(), "profile_rank", about, **narrow)
    return ranks.get(rank, of_steps[0])


def _steps(profile: ProfileFiles) -> str:
    first, last = profile.first, profile.last
    return f"Step {first:,}" if first == last else f"Steps {first:,} to {last:,}"


def _stacks(flame: FlameGraph) -> None:
    kinds = [f":{color}-badge[{kind}]" for kind, color in BADGES.items()]
    st.markdown(f"**Stacks** {' '.join(kinds)}")
    alt = "Flame graph: functions by time, callers above what they call"
    plot(flame_figure(flame), "profile_stacks", alt)
    left = flame.left_out + max(0, len(flame.parent) - MAX_NODES)
    more = f" {left:,} smaller functions are left out." if left else ""
    st.caption(f"Click a function to zoom in, the bar above to zoom out.{more}")


def _notes(run: RunInfo, summary: ProfileSummary, profile: ProfileFiles) -> list[str]:
    steps = summary.last - summary.first + 1
    notes = [f"Sums over {steps} steps." if steps > 1 else "Of one step."]
    if summary.operators_left:
        notes.append(f"{summary.operators_left:,} smaller operators are not shown.")
    notes.append("Click a column to sort.")
    if not summary.cuda:
        on_gpu = run_content(run).has_cuda
        notes.append(NO_CUDA if on_gpu else "No CUDA kernels were recorded: the run is on a CPU.")
    if not summary.stacks:
        notes.append("Without Python's frames: another profiler of Python was active.")
    if profile.trace_size is not None:
        notes.append(PERFETTO)
    return notes
