"""Streamlit elements that several pages share."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.charts.run_view import has_simulated_gpus
from dashboard.format import code_between_backticks, escape_markdown, note
from dashboard.run_files import too_large_to_download
from dashboard.services import Devices, Services
from dashboard.sources import connection_problem, connection_text
from stepscope.common.formatting import printable
from stepscope.compare.report_page import Report, ReportError
from stepscope.run import RunInfo
from trainer.runners.child_process import PROJECT

READING_WIDTH = 820  # px
TABLE_HEIGHT = 320  # px
NAMED = 8  # Runs that a text names; it counts the others.
PLOT_CONFIG: dict[str, Any] = {
    "displaylogo": False,
    "modeBarButtons": [["toImage"]],
    "toImageButtonOptions": {"filename": "stepscope", "scale": 2},
}
OUTPUT_LINES = 12  # Lines that fit into a box of TABLE_HEIGHT.
text = st.column_config.TextColumn
number = st.column_config.NumberColumn


def devices(server: Services) -> Devices:
    """Return the devices; draw a spinner while torch is imported."""
    if not server.known_devices():
        with st.spinner("Loading PyTorch and looking for GPUs…", show_time=True):
            server.devices()
    return server.devices()


def simulated_badge(server: Services, run: RunInfo | None = None) -> None:
    """Draw which figures of simulated GPUs are real: of this machine, or of `run`."""
    # Only in the simulator's Python does a page without devices wait for torch.
    here = run is None and "cudasim" in sys.modules and devices(server).simulated
    if here if run is None else has_simulated_gpus(run):
        st.markdown(
            ":orange-badge[:material/science: Simulated GPU] Allocated, reserved and peak memory "
            "are real values of PyTorch. Times, power and utilization are simulated."
        )


def connections(server: Services) -> None:
    """Draw a line for each remote source: its state, and why it is not connected."""
    if server.sources:
        _connections(server)


@st.fragment(run_every="1s")
def _connections(server: Services) -> None:
    for source in server.sources:
        state = source.state()
        text = f"{printable(source.label)} · {connection_text(state)}"
        icon = "cloud_done" if state.connected else "cloud_off"
        problem = "" if state.connected else connection_problem(state)
        note(icon, escape_markdown(text + problem))


def practice_command() -> str | None:
    """Return the command that provides simulated GPUs; None where the simulator cannot run."""
    supported = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    return "make run-simulated" if supported and (PROJECT / "simulator").is_dir() else None


def warning(text: str, icon: str = "error") -> None:
    """Draw a warning from text that is not Markdown, except code between backticks."""
    st.warning(code_between_backticks(printable(text)), icon=f":material/{icon}:")


def warn_of_unreadable(reasons: Sequence[str]) -> None:
    """Draw why folders of runs, and runs, cannot be read."""
    for reason in reasons[:NAMED]:
        warning(reason)
    if len(reasons) > NAMED:
        warning(f"{len(reasons) - NAMED:,} more runs cannot be read.")


def table(
    rows: Sequence[dict[str, Any]] | dict[str, list[Any]],
    columns: dict[str, Any] | None,
    key: str,
    alt: str,
    **options: Any,
) -> Any:
    """Draw rows, or columns, as a table with a scroll bar; `alt` is for screen readers."""
    options.setdefault("height", TABLE_HEIGHT if len(rows) > 8 else "auto")
    return st.dataframe(
        rows, column_config=columns, hide_index=True, placeholder="–", key=key, alt=alt, **options
    )


def plot(figure: dict[str, Any], key: str, alt: str | None = None) -> None:
    """Draw a Plotly figure; pointing at it shows a button that saves it as PNG."""
    st.plotly_chart(figure, key=key, config=PLOT_CONFIG, alt=alt)


def download(
    label: str,
    make: Callable[[], str | bytes],
    name: str,
    key: str,
    text: str,
    *,
    file: tuple[Path, int] | None = None,
    mime: str | None = None,
) -> None:
    """Draw a download button for `make`'s result, or the path of a `file` that is too large."""
    refused = None if file is None else too_large_to_download(*file)
    if refused is not None:
        st.caption(escape_markdown(printable(refused)), width="content")
        return
    st.download_button(
        label,
        make,
        file_name=name,
        key=key,
        mime=mime,
        icon=":material/download:",
        on_click="ignore",
        help=text,
    )


def report_button(make: Callable[[], str], name: str, key: str) -> None:
    """Draw a button for a report; one that cannot be written is a page with the reason."""

    def page() -> str:
        try:
            return make()
        except ReportError as error:
            reason = Report("Report")
            reason.paragraph(str(error))
            return reason.html()

    about = "One page without host names and paths, for a ticket or an e-mail."
    download("Report", page, f"{name}.html", key, about, mime="text/html")


def start_button(
    label: str, refused: str | None, text: str, place: Any = st, **options: Any
) -> bool:
    """Draw a button, and its disabled reason below; return True for a press."""
    options = {"type": "primary"} | options
    # Without a tooltip while disabled: it would open under the pointer that has just started a run.
    about = text if refused is None else None
    pressed = place.button(label, disabled=refused is not None, help=about, **options)
    if refused is not None:
        place.caption(f":material/block: {escape_markdown(refused)}")
    return bool(pressed and refused is None)


def output(text: str) -> None:
    """Draw the output of a program; a long one is scrolled to its end."""
    # Only a container can be scrolled to its end, not the text in it.
    height: Any = TABLE_HEIGHT if text.count("\n") > OUTPUT_LINES else "content"
    with st.container(height=height, border=False, autoscroll=True):
        st.code(text, language=None, wrap_lines=True)
