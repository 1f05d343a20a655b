"""What stands around the charts when there is nothing to show."""

from __future__ import annotations

import shlex

import streamlit as st

from dashboard.services import Devices, Services
from stepscope.formatting import format_bytes


def empty_page(server: Services, found: Devices) -> None:
    """Say what to do: press Start, or watch a script of one's own."""
    best = found.devices[0]
    runs = server.list_runs()
    recorded = " Recorded runs are in the list above." if runs else ""
    with st.container(border=True, key="empty"):
        st.markdown(
            "#### Nothing is running yet\n"
            f"Training would run on **{best.name}** ({format_bytes(best.memory_total)}). "
            "Choose a workload and a precision on the left, then press **Start**: loss, memory "
            "and utilization appear here and move on while you watch."
        )
        st.markdown("Or watch a training script of your own, unchanged, from a terminal:")
        folder = shlex.quote(str(server.runs.absolute()))
        st.code(
            f"STEPSCOPE_RUNS={folder} stepscope watch train.py", language="bash", wrap_lines=True
        )
        st.caption(
            f"This page reads the runs in `{server.runs.absolute()}`: what begins to record there "
            f"appears here by itself.{recorded}"
        )
        if found.cuda_reason:
            st.caption(
                f"{found.cuda_reason} Everything else works: on a CPU run the memory chart shows "
                "the memory of the process, because torch keeps no allocated and reserved "
                "counters for the CPU."
            )
        examples = [run for run in runs if run.folder.parent == server.examples]
        for run in examples:
            st.button(
                f"Open the recorded demonstration {run.id}",
                key=f"open_{run.id}",
                on_click=_open,
                args=(run.id,),
            )


def _open(run_id: str) -> None:
    st.session_state["run"] = run_id
