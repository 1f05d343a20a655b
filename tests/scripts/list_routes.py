"""Print every route of the app, also Streamlit's, as JSON: kind, path and methods."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import streamlit as st
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from dashboard.api.routes import ROUTES


class PrintRoutes:
    """ASGI middleware that prints the routes of its application."""

    def __init__(self, app: ASGIApp) -> None:
        del app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        routes = scope["app"].routes
        found = [
            (type(each).__name__, each.path, sorted(getattr(each, "methods", None) or ["GET"]))
            for each in routes
        ]
        sys.stdout.write(json.dumps(found))


app = st.App("dashboard/main.py", routes=ROUTES, middleware=[Middleware(PrintRoutes)])


async def nothing(*_: Any) -> Any:
    return {}


asyncio.run(app({"type": "lifespan"}, nothing, nothing))
