"""The script that Streamlit runs for each tab: page settings and the views."""

from pathlib import Path

import streamlit as st

st.set_page_config(
    page_title="Stepscope",
    # A file of ours: Streamlit would fetch a named icon from the internet.
    page_icon=str(Path(__file__).with_name("icon.svg")),
    layout="wide",
    initial_sidebar_state="expanded",
)
st.navigation([st.Page("views/live.py", title="Live", default=True)], position="hidden").run()
