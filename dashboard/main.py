"""The script that Streamlit runs for each tab: page settings and the views."""

import streamlit as st

st.set_page_config(
    page_title="Stepscope", page_icon=":material/monitoring:", layout="wide",
    initial_sidebar_state="expanded",
)  # fmt: skip
st.navigation(
    [st.Page("views/live.py", title="Live", icon=":material/monitoring:", default=True)],
    position="hidden",
).run()
