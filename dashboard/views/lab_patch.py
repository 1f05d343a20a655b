"""The card "Patch" of a tuned script: the diff, lines to insert by hand, and the other settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
_BUTTON_JS = """
export default function ({ data, parentElement }) {
  const button = parentElement.querySelector("button");
  button.onclick = async () => {
    // Without https, and on another host than localhost, a browser has no clipboard.
    const copied = navigator.clipboard?.writeText(data).then(() => "Copied", () => "Not allowed");
    button.textContent = (await copied) ?? "Copying needs https";
    setTimeout(() => { button.textContent = "Copy patch"; }, 2000);
  };
}
"""
_BUTTON_CSS = """
button {
  font: 400 0.875rem var(--st-font);
  padding: 0.25rem 0.75rem;
  min-height: 2.5rem;
  cursor: pointer;
  color: #fff;
  background: var(--st-primary-color);
  border: 1px solid var(--st-primary-color);
  border-radius: var(--st-button-radius);
}
"""
_copy_button: Callable[..., Any] = st.components.v2.component(
    "stepscope_copy",
    html='<button type="button" aria-live="polite">Copy patch</button>',
    css=_BUTTON_CSS,
    js=_BUTTON_JS,
)


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
        with st.container(horizontal=True, key="lab_patch_buttons"):
            _copy_button(key="lab_copy_patch", data=patch.diff, width="content")
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
