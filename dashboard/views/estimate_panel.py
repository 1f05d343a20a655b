"""The button "Will it fit?" of the sidebar, and what the prediction said above the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard.charts.batch_size_curve import batch_figure
from dashboard.controls.config_widgets import take_proposal
from dashboard.format import escape_markdown
from dashboard.services import ServerActivity, Services
from dashboard.views.parts import plot, table
from stepscope.common.formatting import format_bytes
from stepscope.run import RunError
from trainer.config import ConfigIssue, RunConfig
from trainer.runners.child_process import ChildOutput, ChildState, PredictionRun

ERROR = "fit_error"  # In the session's state: a sentence that the panel shows once.
LOOK = "500ms"
NAMES = {
    "parameters": "Parameters",
    "gradients": "Gradients",
    "optimizer_state": "Optimizer state",
    "activations": "Activations",
    "inputs": "Batches and data",
    "temporary": "Temporary (backward, optimizer)",
    "workspace": "Library workspaces",
    "rounding": "Allocator rounding",
    "context": "CUDA context (estimate)",
    "data_set": "Dataset in memory",
    "prefetched_batches": "Prefetched batches",
    "process": "Process itself",
    "gradient_buckets": "DDP gradient buckets",
    "other_ranks": "Other ranks",
}


def estimate_buttons(server: Services, config: RunConfig, problems: Sequence[ConfigIssue]) -> None:
    """Draw the two buttons; not where the settings cannot start."""
    if problems:
        return
    with st.container(horizontal=True, key="fit_buttons"):
        for label, largest, help_text in (
            (
                "Estimate memory",
                False,
                "Estimate the peak memory of these settings without training, in a separate "
                "process.",
            ),
            (
                "Find max batch size",
                True,
                "Estimate other batch sizes too, and measure the throughput of those that fit in "
                "short runs.",
            ),
        ):
            activity = ServerActivity.BATCH_SIZE_FINDER if largest else ServerActivity.ESTIMATE
            refused = server.busy_reason(activity)
            st.button(
                label,
                key=f"fit_{'largest' if largest else 'now'}",
                disabled=refused is not None,
                help=refused or help_text,
                on_click=_start,
                args=(server, config, largest),
            )


def _start(server: Services, config: RunConfig, largest: bool) -> None:
    try:
        server.start_estimate(config, largest=largest)
    except (RunError, OSError) as error:
        st.session_state[ERROR] = f"The estimate could not start. {error}"


def estimate_panel(server: Services, config: RunConfig) -> None:
    """Draw the last prediction, if there is one; it moves on while it works."""
    error = st.session_state.pop(ERROR, None)
    if error is not None:
        st.error(error, icon=":material/error:")
    last = server.estimates.last()
    if last is None:
        return
    with st.container(border=True, key="fit_panel"):
        if last.running():
            st.fragment(_progress, run_every=LOOK)(last)
        else:
            _result(server, last, config)


def _progress(run: PredictionRun) -> None:
    output = run.output()
    if output.state is not ChildState.RUNNING:
        st.rerun()
    st.progress(output.share, text=f"{escape_markdown(output.text)}… {output.seconds:.0f} s")
    if st.button("Stop", key="fit_stop", icon=":material/stop:"):
        run.stop()
        st.rerun()


def _result(server: Services, run: PredictionRun, config: RunConfig) -> None:
    output = run.output()
    if output.state is ChildState.FINISHED:
        _answer(output, run, config)
    elif output.state is ChildState.STOPPED:
        st.caption(":material/stop: The prediction was stopped.")
    else:
        st.error(f"No estimate. {escape_markdown(output.reason or '')}")
    st.button("Close", key="fit_close", icon=":material/close:", on_click=server.estimates.drop)


def _answer(output: ChildOutput, run: PredictionRun, config: RunConfig) -> None:
    answer = output.answer
    said = f"**{VERDICTS[answer['fits']]}** {escape_markdown(answer['reason'])}"
    draw = {True: st.success, False: st.error, None: st.warning}[answer["fits"]]
    draw(said, icon=":material/memory:")
    if run.config != config:
        st.caption(":material/info: Settings changed since this estimate. Run it again.")
    table(rows(answer), None, "fit_parts", "Parts of the memory", width="content")
    margin = answer["margin"]
    learned = (
        f"learned from {margin['runs']} earlier runs"
        if margin["source"] == "learned"
        else f"default; {margin['runs']} earlier runs are too few"
    )
    st.caption(
        f"{escape_markdown(answer['device_name'])} · batch {run.config.batch_size:,} · margin "
        f"{100 * (margin['factor'] - 1):.0f} % ({learned}) · {output.seconds:.0f} s"
    )
    for note in answer["notes"]:
        st.caption(f":material/info: {escape_markdown(note)}")
    if isinstance(answer.get("largest"), dict):
        _largest(answer["largest"], config)


def rows(answer: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the table: each part, their sum, what is outside of it, and what is free."""
    peak = answer["predicted_peak_bytes"]
    found = [
        _row(NAMES.get(name, name), size, peak) for name, size in answer["parts"].items() if size
    ]
    found.append(_row("Predicted peak", peak, peak))
    reserved = answer["predicted_reserved_bytes"]
    if reserved is not None:
        found.append(_row("Reserved by torch", reserved))
    found += [_row(NAMES.get(name, name), size) for name, size in answer["outside"].items() if size]
    found.append(_row("Total with safety margin", answer["needed_bytes"]))
    if answer["free_bytes"] is not None:
        found.append(_row("Free now", answer["free_bytes"]))
    return found


def _row(name: str, size: int, of: int | None = None) -> dict[str, str]:
    share = "" if not of else f"{100 * size / of:.0f} %"
    return {"Memory": name, "Size": format_bytes(size), "Of the peak": share}


def _largest(curve: Mapping[str, Any], config: RunConfig) -> None:
    figure = batch_figure(curve)
    if figure is not None:
        plot(figure, "fit_curve")
    st.markdown(escape_markdown(curve["why"]))
    for sentence in curve["not_measured"]:
        st.caption(f":material/info: {escape_markdown(sentence)}")
    recommended = curve["recommended"]
    if recommended is not None and recommended != config.batch_size:
        st.button(
            f"Use batch size {recommended:,}",
            key="fit_use",
            icon=":material/tune:",
            on_click=take_proposal,
            args=({"field": "batch_size", "value": recommended},),
        )


VERDICTS = {True: "It fits.", False: "It does not fit.", None: "Unknown."}
