"""The results of a sweep: the best combination, the chart, the table, and disturbances."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import streamlit as st

from dashboard.charts.lab import absent_sentence, effects_figure, listed, rows
from dashboard.controls.lab_labels import clock_rows, throttle_words
from dashboard.format import button, escape_markdown, note
from dashboard.sweep_content import Best, SweepContent, SweepStatus, Verdict
from dashboard.views.parts import number, plot, table, text

TIME, SIZE = "%.2f ms", "%.1f MiB"
COLUMNS = {
    "Setting": text(pinned=True, help="What differs from the baseline."),
    "Verdict": text(
        help="By Student's t on log ratios to the baseline of each round, with one level for all "
        "settings and looks."
    ),
    "Reason": text(width="medium", help="Why a setting failed or has no verdict."),
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
    "Data wait": number(format=TIME, help="Part of the step time."),
    "H2D copy": number(format=TIME, help="Part of the step time."),
    "GPU time": number(format=TIME, help="Part of the step time."),
    "Peak allocated": number(format=SIZE, help="Highest memory_allocated()."),
    "Peak reserved": number(format=SIZE, help="Highest memory_reserved()."),
    "Peak process": number(format=SIZE, help="Highest resident memory of the process."),
    "Energy": number(format="%.3g mJ", help="GPU energy per sample."),
    "MFU": number(format="%.1f%%", help="Share of the device's peak FLOP/s that the model used."),
    "Loss": number(format="%.3g", help="Loss after equal steps."),
    "Loss verdict": text(
        help="Against the baseline. Same: its 95% interval lies within ±3%. Not shown equal: it "
        "does not, and the loss may differ."
    ),
}


def results(sweep: SweepContent, apply: Callable[[], None]) -> None:
    """Draw all results; a press on "Apply settings" calls `apply`."""
    _best(sweep, apply)
    figure = effects_figure(sweep)
    with st.container(border=figure is not None, key="lab_chart"):
        if figure is not None:
            plot(figure, "lab_effects")
        elif sweep.status.live:
            st.caption("Effects appear after the first rounds.")
    drift, throttled = sweep.drift, throttle_words(sweep)
    if drift is not None and drift.found:
        st.warning(escape_markdown(drift.text), icon=":material/trending_down:")
    if throttled is not None:
        st.warning(escape_markdown(throttled), icon=":material/device_thermostat:")
    if drift is not None and not drift.found:
        note("check", escape_markdown(drift.text))
    if sweep.arms:
        with st.container(key="lab_table"):
            arms = rows(listed(sweep))
            table(arms, COLUMNS, "lab_rows", "Settings by effect", height="content")
    absent = absent_sentence(sweep)
    if absent is not None:
        note("info", absent)
    _more(sweep)


def _more(sweep: SweepContent) -> None:
    rows = clock_rows(sweep)
    if rows:
        with st.expander("Clocks and power of each round", icon=":material/speed:"):
            st.table(rows)
    if sweep.tried:
        with st.expander("Combinations tried", icon=":material/call_merge:"):
            for tried in sweep.tried:
                word = "kept" if tried.kept else "left out"
                why = f": {tried.reason}" if tried.reason else ""
                st.caption(escape_markdown(f"{labels(sweep, tried.names)}: {word}{why}"))
    if sweep.machine:
        with st.expander("Baseline and machine", icon=":material/info:"):
            st.json({"machine": sweep.machine, "baseline": sweep.config})


def labels(sweep: SweepContent, names: Iterable[str], between: str = " + ") -> str:
    """Return the labels of these variants, as in the table."""
    known: dict[str, str] = {arm.name: arm.label for arm in sweep.arms}
    return between.join(known.get(name, name) for name in names)


def _best(sweep: SweepContent, apply: Callable[[], None]) -> None:
    best = sweep.best
    if best is None and not (sweep.tried and sweep.status is SweepStatus.FINISHED):
        return
    pressed = False
    with st.container(border=True, horizontal=True, vertical_alignment="center", key="lab_best"):
        if best is None:
            st.markdown(
                "**No best combination:** every faster combination had a worse loss after the same "
                "number of steps."
            )
        elif not best.changes:
            why = best.reason or best.text or "No setting is faster than the baseline."
            st.markdown(f"**No better combination.** {escape_markdown(why)}")
        else:
            parts, effect = labels(sweep, best.names), _confirmation(best)
            st.markdown(
                f"**Best combination:** {escape_markdown(parts)}  \n{escape_markdown(effect)}",
                width="stretch",
            )
            problem = _problem(sweep.status, best)
            about = "Put the baseline with these changes into the sidebar of the Run page."
            pressed = button("Apply settings", "tune", "lab_use", about, problem, type="primary")
    if pressed:
        apply()


def _confirmation(best: Best) -> str:
    """Return the result of confirming the best combination, as sentences."""
    parts = [f"{best.text.rstrip('.')}." if best.text else ""]
    if best.verdict in (Verdict.SLOWER, Verdict.NO_DIFFERENCE):
        parts.append("The confirmation against the baseline shows no gain.")
    elif best.verdict not in (None, Verdict.FASTER, Verdict.MEASURING):
        parts.append("Not confirmed against the baseline.")
    if best.loss_is_worse:
        parts.append(f"Its loss after equal steps is worse: {best.loss.text or 'no figure'}.")
    elif best.loss_not_shown_equal:
        parts.append(f"After equal steps, its {best.loss.text or 'loss is not shown equal'}.")
    if best.reason is not None and best.reason.rstrip(".") not in parts[0]:
        parts.append(best.reason)
    return " ".join(filter(None, parts))


def _problem(status: SweepStatus, best: Best) -> str | None:
    """Return why the best combination cannot be applied; None if it can."""
    if status.live:
        return "Confirmation is still running."
    if best.verdict is Verdict.FAILED:
        return "The confirmation run failed."
    if best.verdict is Verdict.SLOWER:
        return "The confirmation shows it is slower."
    if best.loss_is_worse:
        return "Its loss is worse than the baseline's after the same number of steps."
    return None
