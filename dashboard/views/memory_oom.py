"""The out-of-memory section of the Memory tab: the cause, its evidence, and what to do."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import streamlit as st

from dashboard import services
from dashboard.format import button, escape_markdown
from dashboard.out_of_memory import OomRetry, retry, shortage
from dashboard.services import ServerActivity
from dashboard.views.live_panel import start_with
from dashboard.views.parts import number, table, text, warning
from stepscope.memory.oom.reader import OomAnalysis
from stepscope.memory.oom.record import OomAllocationSite, OomRecord
from stepscope.run import RunInfo

FRAMES = 12
LIBRARY = ("/torch/", "/site-packages/")
COLUMNS = {
    "Size": number(format="%.1f MiB", pinned=True, help="Total of all blocks in the row."),
    "Blocks": number(format="localized", help="Live blocks in the row."),
    "Module": text(help="Module whose forward pass allocated it, if the stack shows one."),
    "Line": text(width="large", help="Innermost line outside torch."),
    "Stack": text(width="large", help="The innermost line first."),
}


def oom_section(run: RunInfo) -> None:
    """Draw why memory ran out and what to do; nothing if no allocation failed."""
    devices = services.get().devices().devices
    try:
        found = shortage(run, devices)
    except (OSError, ValueError) as error:
        warning(f"The out-of-memory record cannot be read: {error}")
        return
    if found is None:
        return
    verdict, record = found.verdict, found.report.last
    ended = "Out of memory" if found.report.ended else "Allocation failed, script continued"
    with st.container(border=True, key="oom"):
        st.markdown(f"#### {ended}: {escape_markdown(verdict.case.value)}")
        st.markdown(escape_markdown(verdict.text))
        st.caption(escape_markdown(_when(found)))
        left, right = st.columns([2, 3], gap="large")
        with left:
            st.markdown(evidence_table(verdict.evidence))
        with right:
            st.markdown("##### What to try, best first")
            for position, step in enumerate(verdict.next, start=1):
                st.markdown(f"{position}. {escape_markdown(step.text)}")
                if step.code is not None:
                    st.code(step.code, language="python" if "\n" in step.code else None)
            again = retry(run, devices)
            if again is not None:
                _retry(again, helps=any(step.name == "batch_size" for step in verdict.next))
        _blocks(record)
        if record.stack:
            with st.expander("Allocating stack, innermost frame first"):
                st.code("\n".join(record.stack), language=None)


def _when(found: OomAnalysis) -> str:
    last, seen = found.report.last, found.report.seen
    try:
        clock = f"{datetime.datetime.fromtimestamp(last.ts):%H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        clock = "unknown time"
    parts = [f"After step {last.step:,}", f"at {clock}"]
    if last.phase is not None:
        parts.append(f"during {last.phase}")
    if seen > 1:
        parts.append(f"last of {seen:,} failed allocations")
    if last.incomplete is not None:
        parts.append(f"missing: {last.incomplete}")
    return f"{', '.join(parts)}."


def evidence_table(evidence: Mapping[str, str]) -> str:
    """Return the figures as a Markdown table, the values aligned on the right."""
    rows = [f"| {_cell(name)} | {_cell(shown)} |" for name, shown in evidence.items()]
    return "\n".join(["| Evidence | Value |", "|:--|--:|", *rows])


def _cell(text: str) -> str:
    return escape_markdown(" ".join(text.split()))


def _retry(again: OomRetry, *, helps: bool) -> None:
    """Draw the button, as the primary one if a smaller batch is among the suggestions."""
    drawn = again.as_button(services.get().busy_reason(ServerActivity.RUN))
    refused = drawn["refused"]
    more = {"on_click": start_with, "args": (again.config,)}
    kind = "primary" if helps else "secondary"
    button(drawn["label"], "replay", "oom_retry", drawn["help"], refused, type=kind, **more)
    if refused is not None:
        st.caption(escape_markdown(refused))


def _blocks(record: OomRecord) -> None:
    reason = escape_markdown(record.blocks_reason or "")
    if record.blocks:
        st.markdown("##### The largest live blocks")
        rows = [block_row(block) for block in record.blocks]
        used = {name for row in rows for name, value in row.items() if value is not None}
        shown = [{name: value for name, value in row.items() if name in used} for row in rows]
        table(shown, COLUMNS, "oom_blocks", "The largest live blocks of GPU memory")
    if reason:
        st.caption(f"{'Without stacks' if record.blocks else 'No list of live blocks'}: {reason}.")


def block_row(block: OomAllocationSite) -> dict[str, Any]:
    """Return a row of the table; missing values are None."""
    own = (frame for frame in block.frames if not any(part in frame for part in LIBRARY))
    return {
        "Size": block.size / 2**20,
        "Blocks": block.count,
        "Module": block.module,
        "Line": next(own, None),
        "Stack": " ← ".join(block.frames[:FRAMES]) or None,
    }
