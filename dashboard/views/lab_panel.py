"""One sweep on the Lab page: its choice, its progress, its buttons and its results.

While it runs, a fragment redraws it each second: elements keep their keys, so changes are drawn.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable

import streamlit as st

from dashboard.charts.lab import effects_figure, listed, reasons, rows
from dashboard.controls import sidebar as controls
from dashboard.controls.lab_form import workload_and_device
from dashboard.controls.run_picker import distinct
from dashboard.format import button, escape_markdown, pick
from dashboard.services import ServerActivity, Services
from dashboard.sweep_content import Best, SweepContent, SweepStatus
from dashboard.sweeps import EXAMPLE, StoredSweep
from dashboard.views.live_panel import APPLIED
from dashboard.views.parts import download, number, plot, report_button, table, text
from stepscope.common.config_issue import ConfigError
from stepscope.common.secrets import without_secrets
from stepscope.compare.reports import sweep_report
from stepscope.lab.folder import SweepError
from stepscope.lab.patch import Patch, read_patch
from stepscope.lab.verdict_text import VariantVerdict
from stepscope.run import RunError
from trainer.config import RunConfig

ERROR = "lab_error"  # Session state: a sentence that the page shows once.
SWEEP = "lab_sweep"  # Session state: the id of the shown sweep, also `sweep` in the URL.
REDRAW_S = 1.0
TIME = "%.2f ms"
SIZE = "%.1f MiB"
MAX_SETTING_WIDTH = 320  # px
COLUMNS = {
    "Verdict": text(
        help="By Student's t on log ratios to the baseline of each round, with one level for all "
        "settings and looks."
    ),
    "Effect": number(format="%+.1f%%", help="Throughput relative to the baseline."),
    "Interval": text(help="Confidence interval of the effect, in percent."),
    "Margin of error": number(
        format="%.1f%%",
        help="How far the true effect may be from the verdict: from the effect if faster or "
        "slower, otherwise from 0.",
    ),
    "Rounds": number(help="Rounds in which this setting and the baseline were measured."),
    "Samples/s": number(format="%,.1f", help="Median over the rounds."),
    "Step time": number(format=TIME, help="Median over the rounds."),
    **dict.fromkeys(
        ("Data wait", "H2D copy", "GPU time"), number(format=TIME, help="Part of the step time.")
    ),
    "Peak allocated": number(format=SIZE, help="Highest memory_allocated()."),
    "Peak reserved": number(format=SIZE, help="Highest memory_reserved()."),
    "Peak process": number(format=SIZE, help="Highest resident memory of the process."),
    "Energy": number(format="%.3g mJ", help="GPU energy per sample."),
    "MFU": number(format="%.1f%%", help="Share of the device's peak FLOP/s that the model used."),
    "Loss": number(format="%.3g", help="Loss after equal steps."),
    "Loss verdict": text(
        help="Against the baseline. Same: its 95% interval lies within ±3%. Not shown equal: it "
        "does not, and the loss may differ. No loss: none was measured."
    ),
}


def empty_lab(server: Services) -> None:
    """Draw the purpose of the lab and the recorded sweeps."""
    with st.container(border=True, key="lab_empty"):
        st.markdown(
            "#### Which settings pay off on this machine?\nTrains the workload repeatedly in "
            "fresh processes, with and without each setting, in random order. From the paired "
            "differences it reports how much faster a setting is, or that there is no "
            "difference, and how small a difference it could have detected.\n\nSelect "
            "settings or a preset, then press **Start sweep**."
        )
        for example in server.sweeps.list_sweeps():
            title = f"Example: {workload_and_device(example.content)}"
            about = "Open this recorded sweep. Nothing is measured."
            if button(title, "play_circle", f"lab_open_{example.id}", about):
                show_sweep(example.id)
                st.rerun()


def picked_sweep(server: Services) -> str | None:
    """Draw the list of sweeps, if there are any; return the one to show.

    One just started or in the URL, chosen before, running, the newest; an example only if chosen.
    """
    state = st.session_state
    sweeps = server.sweeps.list_sweeps()
    known = {sweep.id: sweep for sweep in sweeps}
    own = [sweep.id for sweep in sweeps if sweep.read_only_reason != EXAMPLE]
    first = next((sweep.id for sweep in sweeps if sweep.live), own[0] if own else None)
    asked = state.get(SWEEP) or st.query_params.get("sweep")
    if asked and asked not in known:
        name = escape_markdown(str(asked)[:80])
        st.warning(f"The sweep {name} no longer exists.", icon=":material/link_off:")
    state[SWEEP] = asked if asked in known else first
    if own or state[SWEEP] is not None:
        names = distinct({sweep.id: label(sweep) for sweep in sweeps})
        pick(
            "Sweep",
            names,
            SWEEP,
            "Earlier sweeps, newest first.",
            label_visibility="collapsed",
            persist_state="session",
        )
    picked: str | None = state[SWEEP]
    if picked is None:
        st.query_params.pop("sweep", None)
    else:
        st.query_params["sweep"] = picked
    return picked


def show_sweep(sweep_id: str | None) -> None:
    """Show this sweep from the next script run on; None for the default one."""
    st.session_state.pop(SWEEP, None)
    st.query_params.pop("sweep", None)
    if sweep_id is not None:
        st.query_params["sweep"] = sweep_id


def label(sweep: StoredSweep) -> str:
    """Return a sweep's label, "Digits, MLP on CPU · 22 Nov 06:15 · finished · 6 settings"."""
    content = sweep.content
    when = time.strftime("%d %b %H:%M", time.localtime(content.created))
    count = len(content.variants) or len(content.plan.variants)
    # The same text until the sweep ends, so that the list is not redrawn with each trial.
    status = "running" if sweep.live else str(content.status)
    name = workload_and_device(content)
    if sweep.read_only_reason == EXAMPLE:
        name = f"Example: {name}"
    return " · ".join([name, when, status, f"{count} setting{'' if count == 1 else 's'}"])


def sweep_panel(server: Services, sweep_id: str) -> None:
    """Draw a sweep; while it runs, again every second."""
    try:
        sweep = server.sweeps.read(sweep_id)
    except SweepError as error:
        st.error(str(error), icon=":material/error:")
        return
    st.fragment(_draw, run_every=REDRAW_S if sweep.live else None)(server, sweep_id, sweep.live)


def attempt(failed: str, action: Callable[[], None]) -> None:
    """Call `action` and run the page again, which shows an error as a sentence."""
    try:
        action()
    except (SweepError, RunError, OSError) as error:
        st.session_state[ERROR] = f"{failed}. {error}"
    st.rerun()


def _draw(server: Services, sweep_id: str, was_live: bool) -> None:
    try:
        sweep = server.sweeps.read(sweep_id)
    except SweepError:  # deleted in another tab
        st.rerun()
    if was_live and not sweep.live:
        st.rerun()  # for the form on the left, and to stop the timer
    with st.container(key="lab_state"):
        _state(sweep.content)
    with st.container(horizontal=True, key="lab_buttons"):
        _actions(server, sweep)
        if sweep.json.get("baseline") is not None:
            _downloads(sweep)
    with st.container(key="lab_found"):
        _patch_card(sweep)
        _results(sweep.content)


def _state(content: SweepContent) -> None:
    title = workload_and_device(content)
    st.markdown(f"#### {escape_markdown(title)}: {content.status}")
    reason = escape_markdown(content.reason) if content.reason else ""
    progress = content.progress
    if content.status.live:
        st.progress(content.share, text=escape_markdown(progress_words(content)))
    elif content.status is SweepStatus.STOPPED:
        done = f" Trials measured: {progress.done}." if progress.total else ""
        st.warning(f"{reason or 'Stopped.'}{done}", icon=":material/pause_circle:")
    elif content.status is SweepStatus.FAILED:
        st.error(reason or "The sweep failed.", icon=":material/error:")


def progress_words(content: SweepContent) -> str:
    """Return the sweep's current trial, its progress and the estimated time left."""
    progress = content.progress
    if content.status is SweepStatus.PENDING or not progress.total:
        return "Starting: loading PyTorch…"
    doing = progress.doing or "measuring"
    before, _, names = doing.rpartition(": ")
    # The number of trials within a time budget is unknown.
    of = "" if content.plan.minutes else f" of {progress.total}"
    parts = [
        f"{before}: {labels(content, [names])}" if before else doing,
        f"{progress.done}{of} trials",
    ]
    if progress.seconds_left is not None:
        left = max(0, round(progress.seconds_left - max(0.0, time.time() - content.updated)))
        parts.append(f"about {left // 60}:{left % 60:02} left")
    return " · ".join(parts)


def _actions(server: Services, sweep: StoredSweep) -> None:
    sweeps = server.sweeps
    refused = sweep.read_only_reason
    if sweep.live:
        about = "Stop now. Measurements are kept; Resume continues from there."
        if button("Stop", "stop_circle", f"lab_stop_{sweep.id}", about, refused):
            with st.spinner("Stopping…"):
                attempt("The sweep could not be stopped", lambda: sweeps.stop(sweep.id))
        return
    if sweeps.not_resumable(sweep) is None:
        refused = refused or server.busy_reason(ServerActivity.SWEEP)
        about = "Continue after the last trial."
        if button("Resume", "resume", f"lab_resume_{sweep.id}", about, refused):
            attempt(
                "The sweep could not be resumed",
                lambda: server.begin(ServerActivity.SWEEP, lambda: sweeps.resume(sweep.id)),
            )
    if sweep.read_only_reason is None:
        with st.popover("Delete…", icon=":material/delete:", key="lab_delete"):
            st.markdown("Delete this sweep and all its measurements?")
            # The key has the sweep's id: a press on an outdated page must not delete another one.
            key = f"lab_delete_sure_{sweep.id}"
            if st.button("Delete", type="primary", key=key, help="For good."):
                show_sweep(None)
                attempt("The sweep could not be deleted", lambda: sweeps.delete(sweep.id))


def _downloads(sweep: StoredSweep) -> None:
    made = functools.partial(json.dumps, sweep.json, indent=1)
    about = "The complete sweep.json with every trial."
    download("JSON", made, f"{sweep.id}.json", "lab_download_json", about, mime="application/json")
    report_button(functools.partial(sweep_report, sweep.json), sweep.id, "lab_download_html")


def _apply(sweep: SweepContent, best: Best) -> None:
    """Put the best combination into the sidebar and open the Run page."""
    try:
        config = RunConfig.from_dict({**sweep.plan.config, **best.changes})
    except ConfigError as error:
        st.session_state[ERROR] = f"These settings cannot be used: {error}"
        st.rerun()
    controls.keep(config)
    applied = f"{workload_and_device(sweep)}, with {labels(sweep, best.names, ', ') or best.label}"
    st.session_state[APPLIED] = f"The sidebar has the settings of the lab: {applied}."
    st.switch_page("views/run.py")


def _results(sweep: SweepContent) -> None:
    _best(sweep)
    figure = effects_figure(sweep)
    with st.container(border=figure is not None, key="lab_chart"):
        if figure is not None:
            plot(figure, "lab_effects")
        elif sweep.status.live:
            st.caption("Effects appear after the first rounds.")
    if sweep.throttled is not None:
        st.warning(escape_markdown(sweep.throttled), icon=":material/device_thermostat:")
    if sweep.variants:
        with st.container(key="lab_table"):
            variants = listed(sweep)
            made = rows(variants)
            width = 20 + 6 * max(len(row["Setting"]) for row in made)  # px; pinned cells are cut
            about = "What differs from the baseline."
            setting = text(pinned=True, width=min(MAX_SETTING_WIDTH, width), help=about)
            columns = {"Setting": setting} | COLUMNS
            table(made, columns, "lab_rows", "Settings by effect", height="content")
            for reason, names in reasons(variants).items():  # a cell of the table would cut it
                st.caption(f"**{escape_markdown(', '.join(names))}:** {escape_markdown(reason)}")
    if sweep.machine:
        with st.expander("Baseline and machine", icon=":material/info:"):
            script = dict(sweep.plan.script or {})
            script |= {"arguments": without_secrets(script.get("arguments", ()))} if script else {}
            st.json({"machine": sweep.machine, "baseline": sweep.plan.config or script})


def labels(sweep: SweepContent, names: Iterable[str], between: str = " + ") -> str:
    """Return the labels of these variants, as in the table."""
    known: dict[str, str] = {variant.name: variant.label for variant in sweep.variants}
    return between.join(known.get(name, name) for name in names)


def _best(sweep: SweepContent) -> None:
    best = sweep.best
    if best is None and not (sweep.left_out and sweep.status is SweepStatus.FINISHED):
        return
    with st.container(border=True, horizontal=True, vertical_alignment="center", key="lab_best"):
        if best is None:
            st.markdown(
                "**No best combination:** every faster setting had a worse loss after the same "
                "number of steps."
            )
        elif not best.changes:
            why = best.reason or best.text or "No setting is faster than the baseline."
            st.markdown(f"**No better combination.** {escape_markdown(why)}")
        else:
            parts = labels(sweep, best.names)
            effect = _confirmation(best)
            st.markdown(
                f"**Best combination:** {escape_markdown(parts)}  \n{escape_markdown(effect)}",
                width="stretch",
            )
            problem = _problem(sweep, best)
            about = "Put the baseline with these changes into the sidebar of the Run page."
            if button("Apply settings", "tune", "lab_use", about, problem, type="primary"):
                _apply(sweep, best)


def _confirmation(best: Best) -> str:
    loss = None if best.loss.verdict == "undecided" else best.loss.text
    found = "; ".join(text.rstrip(".") for text in (best.text, loss) if text)
    why = best.reason if best.reason and best.reason not in found else ""
    return f"{found}. {why}" if found else why


def _problem(sweep: SweepContent, best: Best) -> str | None:
    if sweep.plan.script:
        return "The sidebar has no settings of a script. Start the script with these changes."
    if sweep.status.live:
        return "Confirmation is still running."
    if best.verdict is VariantVerdict.FAILED:
        return "The confirmation run failed."
    if best.verdict is VariantVerdict.SLOWER:
        return "The confirmation shows it is slower."
    if best.loss.verdict == "worse":
        return "Its loss is worse than the baseline's after the same number of steps."
    return None


def _patch_card(sweep: StoredSweep) -> None:
    """Draw the patch of a sweep that has one."""
    try:
        patch = read_patch(sweep.folder)
    except (ValueError, OSError) as error:
        st.error(escape_markdown(f"patch.json cannot be read: {error}"), icon=":material/error:")
        return
    if patch is not None:
        with st.container(border=True, key="lab_patch"):
            _draw_patch(sweep, patch)


def _draw_patch(sweep: StoredSweep, patch: Patch) -> None:
    st.markdown("#### Patch")
    if patch.diff:
        st.code(patch.diff, language="diff", wrap_lines=True)
        about = "Apply it in the script's folder with patch or git apply."
        name = f"{sweep.id}.patch"
        download("Download", lambda: patch.diff, name, "lab_download_patch", about)
    elif not patch.by_hand:
        st.markdown("No combination was confirmed to be faster, so there is no patch.")
    for one in patch.by_hand:
        st.markdown(f"By hand, **{escape_markdown(one.setting)}**: {escape_markdown(one.where)}")
        st.code("\n".join(one.lines), language="python", wrap_lines=True)
