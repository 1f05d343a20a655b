"""The page without a run, and the examples that it offers."""

from __future__ import annotations

import shlex

import streamlit as st

from dashboard.controls.run_picker import RUN
from dashboard.format import code_between_backticks, escape_markdown
from dashboard.services import Devices, Services
from stepscope.common.formatting import format_bytes


def empty_page(server: Services, found: Devices, refused: str | None) -> None:
    """Say what to do: press Start, watch a script of one's own, or look at an example.

    `refused` says why Start cannot be pressed now, None where it can.
    """
    best, folder = found.devices[0], server.runs.absolute()
    with st.container(border=True, key="empty"):
        sweep = server.sweeps.active_id()
        if sweep is not None:
            st.markdown("#### A sweep of the lab is measuring")
            st.page_link(
                "views/lab.py",
                label="Watch it or stop it in Lab",
                icon=":material/science:",
                query_params={"sweep": sweep},
            )
        st.markdown(
            f"{'' if sweep else '#### Nothing is running yet'}\n"
            f"Training would run on **{escape_markdown(best.name)}** "
            f"({format_bytes(best.memory_total)}). "
            "Choose a workload and a precision in the sidebar, then press **Start**: loss, memory "
            "and utilization appear here and move on while you watch."
        )
        if refused is not None:
            st.warning(
                f"**Start** cannot be pressed yet. {code_between_backticks(refused)}",
                icon=":material/block:",
            )
        st.markdown("Or watch a training script of your own, unchanged, from a terminal:")
        st.code(
            f"STEPSCOPE_RUNS={shlex.quote(str(folder))} stepscope watch train.py",
            language=None,
            wrap_lines=True,
        )
        examples(server)
        st.caption(
            f"This page reads the runs in `{folder}`: a run that begins there is shown here by "
            "itself. Recorded runs are on the page Runs."
        )
        if found.cuda_reason:
            st.caption(
                "Without a GPU everything else works: on a CPU run the memory chart shows the "
                "memory of the process, because torch keeps no allocated and reserved counters for "
                "the CPU."
            )


def examples(server: Services) -> None:
    """Offer the recorded examples, each with what it is; nothing where none are installed."""
    recorded = server.list_examples()
    if recorded:
        st.markdown("Recorded examples, to look at before training anything:")
    for run in recorded:
        with st.container(horizontal=True, vertical_alignment="center", key=f"example_{run.id}"):
            opened = st.button(
                str(run.run_json["name"]),
                key=f"open_{run.id}",
                icon=":material/play_circle:",
                help="Open this recording. Nothing is trained.",
            )
            st.caption(str(run.run_json["note"]), width="stretch")
        if opened:
            open_run(run.id)


def open_run(run_id: str) -> None:
    """Go to the live page and show this run."""
    st.session_state[RUN] = run_id
    st.switch_page("views/live.py", query_params={"run": run_id})
