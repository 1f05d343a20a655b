"""The communication page: how fast this machine's collectives are, by operation and size."""

from pathlib import Path

import streamlit as st

from dashboard import services
from dashboard.controls.sidebar import keep_settings
from dashboard.views.communication_panel import choice, introduction, results

server = services.get()
keep_settings()
if not server.devices_known:
    with st.spinner("Loading PyTorch and looking for GPUs…", show_time=True):
        server.devices()
st.html(Path(__file__).resolve().parents[1] / "lab.css")
introduction()
choice(server)
results(server)
