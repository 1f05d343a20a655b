"""The card "Patch" of a tuned script: the diff, lines to insert by hand, and the other settings."""

from __future__ import annotations

import streamlit as st

from dashboard.format import escape_markdown, note
from dashboard.sweeps import StoredSweep
from dashboard.views.parts import download
from stepscope.lab.patch import Patch, read_patch
from stepscope.lab.verdict_text import VariantVerdict

_OTHERS = {
    "Faster alone": (VariantVerdict.FASTER,),
    "Did not help": (VariantVerdict.SLOWER, VariantVerdict.NO_DIFFERENCE),
    "Not decided": (VariantVerdict.UNDECIDED,),
    "Not measured": (VariantVerdict.FAILED, VariantVerdict.IMPOSSIBLE),
}


def patch_card(sweep: StoredSweep) -> None:
    """Draw the patch of a sweep that has one."""
    try:
        patch = read_patch(sweep.folder)
    except (ValueError, OSError) as error:
        st.error(escape_markdown(f"patch.json cannot be read: {error}"), icon=":material/error:")
        return
    if patch is not None:
        with st.container(border=True, key="lab_patch"):
            _draw(sweep, patch)


def _draw(sweep: StoredSweep, patch: Patch) -> None:
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
    best = sweep.content.best if patch.diff or patch.by_hand else None
    variants = [
        variant
        for variant in sweep.content.variants
        if best is None or variant.name not in best.names
    ]
    for title, verdicts in _OTHERS.items():
        listed = [variant for variant in variants if variant.verdict in verdicts]
        if listed:
            with st.expander(f"{title} ({len(listed)})"):
                for variant in listed:
                    why = variant.reason or variant.text or ""
                    note("remove", f"**{escape_markdown(variant.label)}**: {escape_markdown(why)}")
