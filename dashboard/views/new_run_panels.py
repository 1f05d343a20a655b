"""The panel above the run with the last memory estimate of the sidebar's settings."""

from __future__ import annotations

from collections.abc import Mapping
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
from trainer.runners.child_process import PredictionRun

ERROR = "fit_error"  # Key of the session state: a sentence that the panel shows once.
NAMES = {
    "inputs": "Batches and data",
    "temporary": "Temporary (backward, optimizer)",
    "workspace": "Library workspaces",
    "rounding": "Allocator rounding",
    "context": "CUDA context (estimate)",
    "data_set": "Dataset in memory",
    "process": "Process itself",
    "gradient_buckets": "DDP gradient buckets",
}
BUTTONS = {
    ServerActivity.ESTIMATE: (
        *("Estimate memory", "fit_now"),
        "Estimate the peak memory of these settings without training, in a separate process.",
    ),
    ServerActivity.BATCH_SIZE_FINDER: (
        *("Find max batch size", "fit_largest"),
        "Estimate other batch sizes too, and measure the throughput of those that fit in short "
        "runs.",
    ),
}
VERDICTS = {
    True: (st.success, "It fits."),
    False: (st.error, "It does not fit."),
    None: (st.warning, "Unknown."),
}


def estimate_buttons(server: Services, config: RunConfig) -> None:
    with st.container(horizontal=True, key="fit_buttons"):
        for kind, (label, key, about) in BUTTONS.items():
            refused = server.busy_reason(kind)
            more: Any = {"disabled": refused is not None, "help": refused or about}
            more["args"] = (server, config, kind)
            st.button(label, key=key, on_click=_start, **more)


def _start(server: Services, config: RunConfig, kind: ServerActivity) -> None:
    largest = kind is ServerActivity.BATCH_SIZE_FINDER
    try:
        server.begin(kind, lambda: server.estimates.keep(PredictionRun(config, largest=largest)))
    except (RunError, OSError) as error:
        st.session_state[ERROR] = f"The estimate could not start. {error}"


def estimate_panel(server: Services, config: RunConfig) -> None:
    """Draw the progress or result of the last estimate, if any."""
    error = st.session_state.pop(ERROR, None)
    if error is not None:
        st.error(error, icon=":material/error:")
    last = server.estimates.last()
    if last is None:
        return
    with st.container(border=True, key="fit_panel"):
        if last.running():
            st.fragment(_progress, run_every="500ms")(last)
            return
        output = last.output()
        if output.state is ChildState.FINISHED:
            _answer(output.answer, output.seconds, last, config)
        elif output.state is ChildState.STOPPED:
            note("stop", "The estimate was stopped.")
        else:
            st.error(f"No estimate. {escape_markdown(output.reason or '')}")
        st.button("Close", key="fit_close", icon=":material/close:", on_click=server.estimates.drop)


def _progress(run: PredictionRun) -> None:
    output = run.output()
    if output.state is not ChildState.RUNNING:
        st.rerun()
    st.progress(output.share, text=f"{escape_markdown(output.text)}… {output.seconds:.0f} s")
    if st.button("Stop", key="fit_stop", icon=":material/stop:"):
        run.stop()
        st.rerun()


def _answer(
    answer: Mapping[str, Any], seconds: float, run: PredictionRun, config: RunConfig
) -> None:
    draw, verdict = VERDICTS[answer["fits"]]
    draw(f"**{verdict}** {escape_markdown(answer['reason'])}", icon=":material/memory:")
    if run.config != config:
        note("info", "Settings changed since this estimate. Run it again.")
    table(rows(answer), None, "fit_parts", "Parts of the memory", width="content", height="content")
    st.caption(
        f"{escape_markdown(answer['device_name'])} · batch {run.config.batch_size:,} · margin "
        f"{answer['margin']['factor'] - 1:.0%} · {seconds:.0f} s"
    )
    for sentence in answer["notes"]:
        note("info", escape_markdown(sentence))
    if isinstance(answer.get("largest"), dict):
        _largest(answer["largest"], config)


def rows(answer: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the table: the parts of the peak, their sum, other memory, and free memory."""
    peak = answer["predicted_peak_bytes"]
    found: list[tuple[str, int | None, int | None]] = [
        *((_name(part), size, peak) for part, size in answer["parts"].items() if size),
        ("Predicted peak", peak, peak),
        ("Reserved by torch", answer["predicted_reserved_bytes"], None),
        *((_name(part), size, None) for part, size in answer["outside"].items() if size),
        ("Total with safety margin", answer["needed_bytes"], None),
        ("Free now", answer["free_bytes"], None),
    ]
    return [
        {
            "Memory": name,
            "Size": format_bytes(size),
            "Of the peak": f"{size / of:.0%}" if of else "",
        }
        for name, size, of in found
        if size is not None
    ]


def _name(part: str) -> str:
    return NAMES.get(part, part.replace("_", " ").capitalize())


def batch_rows(curve: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per batch size; its throughput is None if it was not measured."""
    return [
        {
            "Batch size": point["batch_size"],
            "Needed, with margin": format_bytes(point["needed_bytes"]),
            "Samples/s": point["samples_per_sec"],
        }
        for point in curve["points"]
    ]


def _largest(curve: Mapping[str, Any], config: RunConfig) -> None:
    alt = "Memory and throughput by batch size"
    table(batch_rows(curve), None, "fit_curve", alt, width="content", height="content")
    st.markdown(escape_markdown(curve["why"]))
    for sentence in curve["not_measured"]:
        note("info", escape_markdown(sentence))
    recommended = curve["recommended"]
    if recommended is not None and recommended != config.batch_size:
        setting = {"field": "batch_size", "value": recommended}
        text = f"Use batch size {recommended:,}"
        use: Any = {"on_click": take_proposal, "args": (setting,)}
        st.button(text, key="fit_use", icon=":material/tune:", **use)
