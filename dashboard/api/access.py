"""Admits this user's processes, everybody else with the server's token, and only own pages."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from urllib.parse import quote, urlencode

import streamlit as st
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepscope.host.servers import loopback_owner, published_server

log = logging.getLogger(__name__)

VARIABLE = "STEPSCOPE_TOKEN"
MIN_TOKEN_CHARS = 16
LOCAL_HOSTS = ("localhost", "127.0.0.1")
NONE = "'none'"
_LOCAL = re.compile(r"http://(?:localhost|127\.0\.0\.1):\d{1,5}")
PROXY_HEADERS = frozenset(
    {
        "forwarded",
        "via",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
        "x-real-ip",
    }
)
# ESTABLISHED and CLOSE_WAIT, of which the client can still be asked.
OPEN_STATES = (1, 8)
ROOT_USER = 0
REFUSAL = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width">
<title>Stepscope: no access</title>
<body style="font: 16px/1.5 sans-serif; max-width: 40em; margin: 3em auto; padding: 0 1em">
<h1>No access to this Stepscope server</h1>
<p>The server admits the user who started it. This request came from another user, from another
host, or through a proxy.</p>
<p>Everybody else needs the address that contains the token. On the server's host it is in a file in
<code>~/.local/state/stepscope/servers/</code>, which only the server's user can read. A server for
other hosts also prints it at its start. <code>STEPSCOPE_TOKEN</code> sets a server's token.</p>
"""


def local_origins(text: str) -> list[str]:
    """Return the origins of this machine in a list separated by spaces, without all others."""
    return [origin for origin in text.split() if _LOCAL.fullmatch(origin)]


def server_token() -> str:
    """Return the token in STEPSCOPE_TOKEN, or else a random one.

    Removes the variable, so that no training process gets it. Ends the program with a sentence if
    the token is too short.
    """
    token = os.environ.pop(VARIABLE, None) or secrets.token_urlsafe(24)
    if len(token) < MIN_TOKEN_CHARS or not token.isascii():
        raise SystemExit(f"{VARIABLE}: must have at least {MIN_TOKEN_CHARS} ASCII characters.")
    return token


class AccessControl:
    """ASGI middleware: admits this user, root, and clients with the token; refuses foreign pages.

    A loopback connection belongs to the user who owns its other end. Other clients send the token
    in an Authorization header, or once as `?token=`, which a cookie replaces.

    Streamlit accepts every port of localhost, where any user's program may serve a page. Browsers
    send an Origin header with every request that may change something, and without it no page of
    another origin can read the answer.

    `hosts` and `origins` are the allowed ones; pages of the origins `frames` may frame this
    server's, by default none.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        frames: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._token = token
        self._hosts = [host for host in hosts if host not in LOCAL_HOSTS]
        self._origins = [origin.rstrip("/") for origin in origins]
        self._framing = f"frame-ancestors {' '.join(frames) or NONE}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection, or publish the address during the server's lifespan."""
        if scope["type"] == "lifespan":
            with self._published():
                await self._app(scope, receive, send)
            return

        async def send_unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Referrer-Policy"] = "same-origin"
                headers.append("Content-Security-Policy", self._framing)
            await send(message)

        request = HTTPConnection(scope)
        answer = self._check_origin(request) or self._check_user(request, receive)
        await (answer or self._app)(scope, receive, send_unframed)

    @contextlib.contextmanager
    def _published(self) -> Iterator[None]:
        """Store the address with the token during the block; print it for other hosts."""
        port = st.get_option("server.port")
        base_path = str(st.get_option("server.baseUrlPath")).strip("/")
        scheme = "https" if st.get_option("server.sslCertFile") else "http"
        path = f"/{base_path}/" if base_path else "/"
        page = f":{port}{path}?token={quote(self._token)}"
        hosts = [socket.gethostname() if "*" in host else host for host in self._hosts]
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(published_server(port, f"{scheme}://localhost{page}"))
            except OSError as error:
                log.warning("The address with the token could not be stored: %s.", error)
                hosts.append("localhost")
            for host in hosts:
                sys.stderr.write(f"With the token: {scheme}://{host}{page}\n")
            yield

    def _check_origin(self, request: HTTPConnection) -> Response | None:
        """Return a refusal of a page of another origin, or None."""
        host = request.headers.get("host")
        origin = request.headers.get("origin")
        if origin is None and request.scope.get("method", "GET") in ("GET", "HEAD"):
            return None
        if origin in (f"http://{host}", f"https://{host}", *self._origins):
            return None
        error = f"Origin: must be this server's, got {str(origin)[:100]!r}. "
        error += "For a proxy: stepscope ui -- --server.corsAllowedOrigins https://its.address"
        return JSONResponse({"error": error}, 403)

    def _check_user(self, request: HTTPConnection, receive: Receive) -> Response | None:
        """Return a refusal, or a redirection to the address without token; None admits."""
        scope = request.scope
        name = f"stepscope-token-{scope['server'][1]}"
        # Of this server only: other servers may have the same token.
        cookie = hmac.new(self._token.encode(), name.encode(), "sha256").hexdigest()
        admitted = (
            _is_own(request, receive)
            or _equal(request.cookies.get(name), cookie)
            or _equal(request.headers.get("authorization"), f"Bearer {self._token}")
        )
        given = request.query_params.getlist("token") if scope.get("method") == "GET" else []
        if given and (admitted or any(_equal(token, self._token) for token in given)):
            answer = RedirectResponse(_address_without_token(request), 303)
            if not admitted:  # a browser sends the cookie to every port of the host
                secure = scope["scheme"] == "https"
                answer.set_cookie(name, cookie, httponly=True, samesite="lax", secure=secure)
            return answer
        if admitted:
            return None
        if scope["path"].startswith("/api/"):
            return JSONResponse({"error": "Authorization: must be Bearer and the token."}, 403)
        return HTMLResponse(REFUSAL, 403)


def _is_own(request: HTTPConnection, receive: Receive) -> bool:
    """Return True if a process of this user or of root has the connection's other end."""
    if not PROXY_HEADERS.isdisjoint(request.headers):  # everybody may use the proxy
        return False
    # uvicorn's protocol. Not `scope["client"]`, which uvicorn takes from a header.
    transport = getattr(getattr(receive, "__self__", None), "transport", None)
    if transport is None:
        return False
    connection = transport.get_extra_info("socket")
    try:
        owner = loopback_owner(connection.getpeername()[:2], connection.getsockname()[:2])
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return False
    # If it is closed, the answer may be of its successor.
    return owner in (ROOT_USER, os.geteuid()) and state in OPEN_STATES


def _equal(given: str | None, secret: str) -> bool:
    """Return True if both are equal, in a time that does not depend on the first difference."""
    return given is not None and hmac.compare_digest(given.encode(), secret.encode())


def _address_without_token(request: HTTPConnection) -> str:
    """Return the address relative to itself, as a proxy may have removed a part of the path."""
    query = urlencode([pair for pair in request.query_params.multi_items() if pair[0] != "token"])
    page = quote(request.scope["path"].rpartition("/")[2])
    return f"./{page}?{query}" if query else f"./{page}"
