"""Refuses requests of foreign pages, and forbids them to frame ours."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class NotAllowed(Exception):
    """The request may come from a foreign page, or the run cannot be asked this."""


class OwnPagesOnly:
    """Refuse requests of foreign pages, WebSockets too, and forbid frames around ours.

    A browser names the page's origin. Streamlit accepts every port of localhost, where any program
    of any user may serve a page. A request without an origin comes from no page that could read the
    answer, or send the headers that `check_sender` asks for. `allowed` are further origins.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str] = ()) -> None:
        self._app = app
        self._allowed = frozenset(origin.rstrip("/") for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, as ASGI has it."""
        headers = Headers(scope=scope) if scope["type"] != "lifespan" else Headers()
        origin, host = headers.get("origin"), headers.get("host")
        app = self._app
        if origin not in (None, f"http://{host}", f"https://{host}", *self._allowed):
            said = f"Origin: must be this server's, got {str(origin)[:100]!r}. "
            remedy = "Name that of a proxy in server.corsAllowedOrigins."
            app = JSONResponse({"error": said + remedy}, 403)

        async def send_unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                added.append("Content-Security-Policy", "frame-ancestors 'none'")
                added["X-Frame-Options"] = "DENY"  # for browsers that do not know the former
            await send(message)

        await app(scope, receive, send_unframed)


def check_sender(request: Request) -> None:
    """Raise NotAllowed unless the request can only come from a page of this server.

    A foreign page can make a browser send a form here, but no other content type and no header of
    its own without asking this server first, which never allows it.
    """
    headers = request.headers
    if headers.get("content-type", "").partition(";")[0] != "application/json":
        raise NotAllowed("Content-Type: must be application/json.")
    if "x-stepscope" not in headers:
        raise NotAllowed("X-Stepscope: the header is missing.")
