"""Rejects requests from other origins, and framing of the dashboard."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NONE = "'none'"
_LOCAL = re.compile(r"http://(?:localhost|127\.0\.0\.1):\d{1,5}")


def local_origins(text: str) -> list[str]:
    """Return the origins of this machine in a list separated by spaces, without all others."""
    return [origin for origin in text.split() if _LOCAL.fullmatch(origin)]


class NotAllowed(Exception):
    """The request may come from another origin, or the run does not accept the command."""


class OwnPagesOnly:
    """ASGI middleware that rejects requests of other origins (also WebSockets) and framing.

    Streamlit accepts every port of localhost, where any user's program may serve a page. A request
    without an Origin header comes from no page that could read the answer or send the headers that
    `check_sender` requires. `allowed`: further origins. `frames`: origins whose pages may frame
    this server's pages, by default none.
    """

    def __init__(
        self, app: ASGIApp, allowed: Collection[str] = (), frames: Collection[str] = ()
    ) -> None:
        self._app = app
        self._frames = " ".join(frames)
        self._allowed = frozenset(origin.rstrip("/") for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        headers = Headers(scope=scope) if scope["type"] != "lifespan" else Headers()
        origin = headers.get("origin")
        host = headers.get("host")
        app = self._app
        if origin not in (None, f"http://{host}", f"https://{host}", *self._allowed):
            error = f"Origin: must be this server's, got {str(origin)[:100]!r}. "
            error += "For a proxy: stepscope ui -- --server.corsAllowedOrigins https://its.address"
            app = JSONResponse({"error": error}, 403)

        async def send_unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                added["Referrer-Policy"] = "same-origin"
                added.append("Content-Security-Policy", f"frame-ancestors {self._frames or _NONE}")
                if not self._frames:
                    added["X-Frame-Options"] = "DENY"  # for browsers without frame-ancestors
            await send(message)

        await app(scope, receive, send_unframed)


def check_sender(request: Request) -> None:
    """Raise NotAllowed unless the request can only come from a page of this server.

    A page of another origin can submit a form, but needs a CORS preflight, which is never granted,
    for another content type or a custom header.
    """
    headers = request.headers
    if headers.get("content-type", "").partition(";")[0] != "application/json":
        raise NotAllowed("Content-Type: must be application/json.")
    if "x-stepscope" not in headers:
        raise NotAllowed("X-Stepscope: the header is missing.")
