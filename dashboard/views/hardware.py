"""The Hardware page: every GPU of this machine."""

from __future__ import annotations

import streamlit as st

from dashboard import services
from dashboard.api.devices import devices_answer
from dashboard.controls.sidebar import keep_settings
from dashboard.live_chart import device_cards

server = services.get()
keep_settings()
with st.spinner("Reading the GPUs of this machine…", show_time=True):
    first = devices_answer(server, {})
device_cards(first, key="devices")
st.caption(
    "Updated once a second while the page is open; nothing is recorded. In a terminal: "
    "`stepscope devices --watch`.",
    help="`stepscope record` saves the same readings to a run folder, ten times per second.",
)
