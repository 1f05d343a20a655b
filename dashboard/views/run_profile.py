"""The profiles of a run: operators, the parts of a step, stacks, and the trace to download."""

from __future__ import annotations

import functools

import streamlit as st

from dashboard.charts.profile import MAX_NODES, flame_figure, phase_figure, rows
from dashboard.charts.run_view import run_content, world_size_of
from dashboard.controls.actions import supported_commands
from dashboard.format import escape_markdown
from dashboard.run_files import ProfileFiles, profile_summary, profile_trace, profiles
from dashboard.views.parts import download, plot, table
from dashboard.views.run_ranks import rank_label
from stepscope.common.formatting import format_bytes, printable
from stepscope.profiling.summary import ProfileSummary
from stepscope.profiling.trace_stats import FlameGraph
from stepscope.recorder.recorder import CommandName
from stepscope.run import RunInfo, read_only_reason

TABLE_HEIGHT = 320  # px
NO_CUDA = "No CUDA times: Nsight Systems was attached and had exclusive access."
BADGES = {"Python": "blue", "module": "green", "built-in function": "gray", "operator": "orange"}
"""Colors of `dashboard.charts.profile.KINDS`."""
number = st.column_config.NumberColumn
TIME, MEMORY = "%.3f ms", "%.2f MiB"
COLUMNS = {
    "Operator": st.column_config.TextColumn(
        pinned=True, width="large", help="PyTorch's name; aten:: is its core tensor library."
    ),
    "Calls": number(format="localized", help="In all profiled steps."),
    "CUDA self": number(format=TIME, help="Time of kernels launched by the operator itself."),
    "CUDA total": number(format=TIME, help="Including child operators."),
    "CPU self": number(format=TIME, help="Time in the operator itself, in all profiled steps."),
    "CPU total": number(format=TIME, help="With the operators that it calls."),
    "CUDA memory": number(
        format=MEMORY, help="Net memory: allocated minus freed by the operator itself."
    ),
    "CPU memory": number(
        format=MEMORY, help="Net memory: allocated minus freed by the operator itself."
    ),
}
PERFETTO = (
    "Open the trace at [ui.perfetto.dev](https://ui.perfetto.dev) with *Open trace file*; it "
    "stays in your browser."
)


@st.fragment
def profile_section(run: RunInfo) -> None:
    """Draw the profile that is chosen, the newest at first; without one say how to get it."""
    made = profiles(run.folder)
    if not made:
        _empty(run)
        return
    with st.container(border=True, key="profile"):
        with st.container(horizontal=True, vertical_alignment="center", key="profile_head"):
            st.markdown("#### Profile", width="content")
            profile = _chosen(run, made)
            _download(run, profile)
        try:
            summary = profile_summary(run.folder, profile)
        except (OSError, ValueError) as error:
            st.warning(f"This profile cannot be read: {printable(str(error))}")
            return
        st.markdown("**Parts of a step**")
        plot(phase_figure(summary), "profile_phases")
        if summary.flame.parent:
            _stacks(summary.flame)
        height = TABLE_HEIGHT if len(summary.operators) > 8 else "auto"
        table(rows(summary), COLUMNS, "operators", "Operators by self time", height=height)
        st.caption(" ".join(_notes(run, summary, profile)))


def _empty(run: RunInfo) -> None:
    asked = run.status.live and read_only_reason(run) is None
    if asked and CommandName.PROFILE in supported_commands(run):
        st.caption(
            ":material/speed: No profile yet. **Profile** in the header records the next steps "
            "with torch.profiler."
        )
    else:
        st.caption(":material/speed: No profile was recorded in this run.")


def _chosen(run: RunInfo, made: tuple[ProfileFiles, ...]) -> ProfileFiles:
    """Draw what is to be chosen, the steps and in a job the rank; as text where there is no choice.

    The rank stays chosen where it has a profile of the other steps as well.
    """
    several = list(dict.fromkeys((profile.first, profile.last) for profile in made))
    steps = several[0]
    if len(several) > 1:
        steps = st.selectbox(
            "Profile",
            several,
            format_func=_steps,
            key="chosen_profile",
            label_visibility="collapsed",
            width=220,
            help="The profiles of this run, the newest first.",
        )
    else:
        st.markdown(_steps(steps), width="content")
    return _of_rank(run, [each for each in made if (each.first, each.last) == steps])


def _of_rank(run: RunInfo, made: list[ProfileFiles]) -> ProfileFiles:
    """Draw the choice of a rank among profiles of the same steps."""
    if world_size_of(run.run_json) < 2 and len(made) == 1:
        return made[0]
    ranks = {rank_label(run.folder, profile.number): profile for profile in made}
    if len(ranks) == 1:
        st.markdown(escape_markdown(next(iter(ranks))), width="content")
        return made[0]
    label = st.selectbox(
        "Rank",
        list(ranks),
        key="profile_rank",
        label_visibility="collapsed",
        width=220,
        help="The process of the job whose profile is shown.",
    )
    return ranks.get(label, made[0])


def _steps(steps: tuple[int, int]) -> str:
    first, last = steps
    return f"Step {first:,}" if first == last else f"Steps {first:,} to {last:,}"


def _download(run: RunInfo, profile: ProfileFiles) -> None:
    if profile.trace_size is None:
        return
    download(
        f"Trace ({format_bytes(profile.trace_size)})",
        functools.partial(profile_trace, run.folder, profile),
        f"{run.id}-{profile.trace}",
        f"trace_{profile.first}_{profile.last}_{profile.number}",
        "Every event of these steps on a time axis, for Perfetto (ui.perfetto.dev).",
        file=(run.folder / profile.trace, profile.trace_size),
        mime="application/gzip",
    )


def _stacks(flame: FlameGraph) -> None:
    kinds = [f":{color}-badge[{kind}]" for kind, color in BADGES.items()]
    st.markdown(f"**Stacks** {' '.join(kinds)}")
    alt = "Flame graph: functions by time, callers above what they call"
    plot(flame_figure(flame), "profile_stacks", alt)
    left = flame.left_out + max(0, len(flame.parent) - MAX_NODES)
    more = f" {left:,} smaller functions are left out." if left else ""
    st.caption(f"Click a function to zoom in, the bar above to zoom out.{more}")


def _notes(run: RunInfo, summary: ProfileSummary, profile: ProfileFiles) -> list[str]:
    """Return the sentences below the table."""
    steps = summary.last - summary.first + 1
    said = [f"Sums over {steps} steps." if steps > 1 else "Of one step."]
    if summary.operators_left:
        said.append(f"{summary.operators_left:,} smaller operators are not shown.")
    said.append("Click a column to sort.")
    if not summary.cuda:
        on_gpu = run_content(run).has_cuda
        said.append(NO_CUDA if on_gpu else "There is no CUDA time on a CPU.")
    if not summary.stacks:
        said.append("Without Python's frames: another profiler of Python was active.")
    if profile.trace_size is not None:
        said.append(PERFETTO)
    return said
