"""The Hardware page: every GPU of this machine, and the speed of its collectives."""

import streamlit as st

from dashboard import services
from dashboard.api.devices import devices_answer
from dashboard.controls.sidebar import keep_settings
from dashboard.live_chart import device_cards
from dashboard.views.collectives_panel import collectives_tab
from dashboard.views.parts import devices

TABS = {"gpus": "GPUs", "collectives": "Collectives"}
TAB = "hardware_tab"

server = services.get()
keep_settings()
asked = st.query_params.get("tab")
st.session_state.setdefault(TAB, TABS.get(asked or "", TABS["gpus"]))
gpus, collectives = st.tabs(list(TABS.values()), key=TAB, on_change="rerun")
tab = "collectives" if collectives.open else "gpus"
if asked != tab:
    st.query_params["tab"] = tab

if tab == "gpus":
    with gpus:
        with st.spinner("Reading the GPUs of this machine…", show_time=True):
            first = devices_answer(server, {})
        device_cards(first, key="devices")
        st.caption(
            "Updated once a second while the page is open; nothing is recorded. In a terminal: "
            "`stepscope devices --watch`.",
            help="`stepscope record` saves the same readings to a run folder, ten times per "
            "second.",
        )
else:
    with collectives:
        devices(server)
        collectives_tab(server)
