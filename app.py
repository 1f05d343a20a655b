"""The launcher: `streamlit run app.py` serves the page and its data routes on one port."""

import os
import sys

import streamlit as st
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from dashboard.api.access import AccessControl, local_origins, server_token
from dashboard.api.routes import ROUTES
from dashboard.arguments import take_arguments
from dashboard.services import lifespan

take_arguments(sys.argv)

# Streamlit checks the Host header of its WebSocket only; this covers our routes as well.
HOSTS = list(st.get_option("server.allowedHosts") or ["*"])
ORIGINS = list(st.get_option("server.corsAllowedOrigins"))
# Set by `stepscope.show()`: the origin of the notebook.
FRAMES = local_origins(os.environ.get("STEPSCOPE_FRAMES", ""))
TOKEN = server_token()

# A literal call: `streamlit run` finds the app by reading this file.
app = st.App(
    "dashboard/main.py",
    routes=ROUTES,
    lifespan=lifespan,
    middleware=[
        Middleware(AccessControl, token=TOKEN, hosts=HOSTS, origins=ORIGINS, frames=FRAMES),
        Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS),
    ],
)
