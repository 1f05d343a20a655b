"""The devices page: every GPU of this machine, whether anything trains on it or not."""

import streamlit as st

from dashboard import services
from dashboard.api.devices import devices_answer
from dashboard.controls.sidebar import keep_settings
from dashboard.live_chart import device_cards

server = services.get()
keep_settings()
with st.spinner("Looking at this machine…", show_time=True):
    first = devices_answer(server, {})
device_cards(first, key="devices")
st.caption(
    "Read once a second while a page looks, whoever uses the GPUs; nothing here is recorded. In a "
    "terminal: `stepscope devices --watch`.",
    help="`stepscope record` writes the same readings into a run folder, ten times a second.",
)
