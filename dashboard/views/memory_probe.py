"""Estimate memory and Find max batch size: the buttons in the sidebar, and the last result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard.controls.config_widgets import take_proposal
from dashboard.format import escape_markdown, note
from dashboard.services import ServerActivity, Services
from dashboard.views.parts import table
from stepscope.common.formatting import format_bytes
from stepscope.host.child_process import ChildState
from stepscope.run import RunError
from trainer.config import RunConfig
from trainer.memory_estimate import probe_problem
from trainer.runners.child_process import MemoryProbeRun

ERROR = "probe_error"  # Key of the session state: a sentence that the panel shows once.
PARTS = {
    "parameters_and_buffers": "Weights and buffers",
    "optimizer_state": "Optimizer state",
    "gradients_activations_and_the_rest": "Gradients, activations and the rest",
}
ON_A_CPU = "On a CPU this is the growth of the process, with the libraries that a first step loads."


def estimate_buttons(server: Services, config: RunConfig) -> None:
    problem = probe_problem(config)
    refused = None if problem is None else str(problem)
    refused = refused or server.busy_reason(ServerActivity.MEMORY_PROBE, config.device)
    with st.container(horizontal=True, key="probe_buttons"):
        st.button(
            "Estimate memory",
            key="probe_memory",
            help=refused or "Measure the peak memory of these settings: a process trains 3 steps.",
            disabled=refused is not None,
            on_click=_start,
            args=(server, config),
        )
        st.button(
            "Find max batch size",
            key="probe_batch_size",
            help=refused or "Measure memory and throughput of larger batches until one fails.",
            disabled=refused is not None,
            on_click=_start,
            args=(server, config),
            kwargs={"search": True},
        )


def _start(server: Services, config: RunConfig, *, search: bool = False) -> None:
    try:
        server.start_probe(config, search=search)
    except (RunError, OSError) as error:
        st.session_state[ERROR] = f"The measurement could not start. {error}"


def estimate_panel(server: Services, config: RunConfig) -> None:
    """Draw the progress or result of the last probe, if any."""
    error = st.session_state.pop(ERROR, None)
    if error is not None:
        st.error(error, icon=":material/error:")
    last = server.probe
    if last is None:
        return
    with st.container(border=True, key="probe_panel"):
        if last.running():
            st.fragment(_progress, run_every="1s")(last)
            return
        output = last.output()
        if output.state is ChildState.STOPPED:
            note("stop", "The measurement was stopped.")
        elif output.state is ChildState.FAILED:
            st.error(
                f"Not measured. {escape_markdown(output.reason or '')}", icon=":material/error:"
            )
        else:
            _result(output.answer, output.seconds, last)
            if last.config != config:
                note("info", "Settings changed since this measurement. Measure again.")
            _use_button(output.answer, config)
        st.button("Close", key="probe_close", icon=":material/close:", on_click=server.drop_probe)


def _progress(run: MemoryProbeRun) -> None:
    output = run.output()
    if output.state is not ChildState.RUNNING:
        st.rerun()
    st.progress(output.share, text=f"{escape_markdown(output.text)}… {output.seconds:.0f} s")
    if st.button("Stop", key="probe_stop", icon=":material/stop:"):
        run.stop()
        st.rerun()


def _result(answer: Mapping[str, Any], seconds: float, run: MemoryProbeRun) -> None:
    probes: Sequence[Mapping[str, Any]] = answer["points"] if run.search else [answer]
    fitting = [probe for probe in probes if probe["fits"]]
    if run.search and fitting:
        st.success(escape_markdown(answer["why"]), icon=":material/memory:")
    elif fitting:
        st.success(_fits_text(answer), icon=":material/memory:")
    else:
        st.error(f"Does not fit: {escape_markdown(probes[0]['reason'])}", icon=":material/memory:")
    alt = "Measured memory"
    if run.search:
        table(batch_rows(probes), None, "probe_sizes", alt, width="content", height="content")
    elif fitting:
        table(part_rows(answer), None, "probe_parts", alt, width="content", height="content")
    config = run.config
    steps = f"{fitting[0]['steps']} steps" if fitting else "until memory ran out"
    settings = f"{config.workload}, {config.precision}"
    if not run.search:
        settings += f", batch size {config.batch_size:,}"
    st.caption(
        f"Measured: {steps} · {settings} · {escape_markdown(probes[0]['device_name'])} · "
        f"{seconds:.0f} s"
    )
    if config.device == "cpu" and fitting:
        note("info", ON_A_CPU)


def _fits_text(probe: Mapping[str, Any]) -> str:
    peak = probe["measured_peak_bytes"]
    reserved = probe["measured_reserved_bytes"]
    allocated = "" if reserved is None else f" allocated, {format_bytes(reserved)} reserved"
    free = format_bytes(probe["free_bytes"])
    return f"**Fits.** Peak {format_bytes(peak)}{allocated}; {free} stay free."


def part_rows(probe: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the table of one probe: the parts of the peak, reserved and free memory."""
    peak = probe["measured_peak_bytes"]
    rows = [
        {"Memory": PARTS[name], "Size": format_bytes(size), "Of the peak": f"{size / peak:.0%}"}
        for name, size in probe["parts"].items()
    ]
    rows.append({"Memory": "Peak", "Size": format_bytes(peak), "Of the peak": "100%"})
    if probe["measured_reserved_bytes"] is not None:
        reserved = format_bytes(probe["measured_reserved_bytes"])
        rows.append({"Memory": "Reserved by PyTorch", "Size": reserved, "Of the peak": ""})
    free = format_bytes(probe["free_bytes"])
    return [*rows, {"Memory": "Left free", "Size": free, "Of the peak": ""}]


def batch_rows(probes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of a search: one row per batch size; missing values are None."""
    rows = []
    for probe in probes:
        row = {"Batch size": probe["batch_size"], "Result": "Does not fit"}
        if probe["fits"]:
            row["Result"] = "Fits"
            row["Peak"] = format_bytes(probe["measured_peak_bytes"])
            if probe["measured_reserved_bytes"] is not None:
                row["Reserved"] = format_bytes(probe["measured_reserved_bytes"])
            row["Samples/s"] = probe["samples_per_sec"]
        rows.append(row)
    return rows


def _use_button(answer: Mapping[str, Any], config: RunConfig) -> None:
    recommended = answer.get("recommended")
    if recommended is None or recommended == config.batch_size:
        return
    st.button(
        f"Use batch size {recommended:,}",
        key="probe_use",
        icon=":material/tune:",
        on_click=take_proposal,
        args=({"field": "batch_size", "value": recommended},),
    )
