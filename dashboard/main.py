"""The script that Streamlit runs for each tab: page settings, navigation and the views."""

from pathlib import Path

if __name__ == "__main__":  # multiprocessing imports this file in data-loading workers too
    import streamlit as st

    from dashboard import services
    from dashboard.views.parts import simulated_badge

    FOLDER = Path(__file__).parent

    st.set_page_config(
        # Local files: Streamlit would fetch a named icon from the internet.
        page_icon=str(FOLDER / "icon.svg"),
        layout="wide",
        initial_sidebar_state="auto",  # closed on a phone
    )
    st.logo(str(FOLDER / "logo.svg"))
    st.html(FOLDER / "page.css")

    pages = [
        st.Page("views/run.py", title="Run", default=True),
        st.Page("views/runs.py", title="Runs", url_path="runs"),
        st.Page("views/compare.py", title="Compare", url_path="compare", visibility="hidden"),
        st.Page("views/lab.py", title="Lab", url_path="lab"),
        st.Page("views/hardware.py", title="Hardware", url_path="hardware"),
        st.Page("views/learn.py", title="Learn", url_path="learn"),
    ]
    shown = st.navigation(pages, position="top")
    st.set_page_config(page_title=f"{shown.title} · Stepscope")
    if shown.url_path:  # the Run page draws that of its run
        simulated_badge(services.get())
    st.session_state.arrived = st.session_state.get("page") != shown.url_path
    st.session_state.page = shown.url_path
    shown.run()
