"""The script that Streamlit runs for each tab: page settings, navigation and the views."""

from pathlib import Path

if __name__ == "__main__":  # multiprocessing imports this file in data-loading workers too
    import streamlit as st

    FOLDER = Path(__file__).parent

    st.set_page_config(
        page_title="Stepscope",
        # Files of ours: Streamlit would fetch a named icon from the internet.
        page_icon=str(FOLDER / "icon.svg"),
        layout="wide",
        initial_sidebar_state="auto",  # closed on a phone
    )
    st.logo(str(FOLDER / "logo.svg"))
    st.html(FOLDER / "page.css")
    pages = [
        st.Page("views/live.py", title="Live", default=True),
        st.Page("views/lab.py", title="Lab", url_path="lab"),
        st.Page("views/memory.py", title="Memory", url_path="memory"),
        st.Page("views/devices.py", title="Devices", url_path="devices"),
        st.Page("views/communication.py", title="Communication", url_path="communication"),
        st.Page("views/runs.py", title="Runs", url_path="runs"),
        st.Page("views/learn.py", title="Learn", url_path="learn"),
    ]
    st.navigation(pages, position="top").run()
