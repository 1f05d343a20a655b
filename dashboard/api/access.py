"""Admits the processes of this user, and everybody else only with the token of the server."""

from __future__ import annotations

import contextlib
import hmac
import html
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from urllib.parse import quote, urlencode

import streamlit as st
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stepscope.host.servers import published_server
from stepscope.host.socket_owner import loopback_owner

log = logging.getLogger(__name__)

VARIABLE = "STEPSCOPE_TOKEN"
MIN_TOKEN_CHARS = 16
LOCAL_HOSTS = ("localhost", "127.0.0.1")
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
<p>If you have opened the page with the token before, and come from a link of another site:
<a href="">open the page</a>.</p>
"""
# Not a redirection: after a link of another site, the browser would not send the new cookie.
ADMISSION = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>Stepscope</title>
<a href="{address}">Open the page</a>
"""


def server_token() -> str:
    """Return the token in STEPSCOPE_TOKEN, or else a random one.

    Removes the variable, so that no training process gets it. Ends the program with a sentence if
    the token is too short.
    """
    token = os.environ.pop(VARIABLE, None) or secrets.token_urlsafe(24)
    if len(token) < MIN_TOKEN_CHARS or not token.isascii():
        raise SystemExit(f"{VARIABLE}: must have at least {MIN_TOKEN_CHARS} ASCII characters.")
    return token


class OwnUserOnly:
    """ASGI middleware that admits this user, root, and clients with the token.

    A loopback connection belongs to the user who owns its other end. Other clients send the token
    in an Authorization header, or once as `?token=`, which a cookie replaces. `hosts` and `origins`
    are the allowed ones, for the addresses. Only the health route is open to everybody.
    """

    def __init__(
        self, app: ASGIApp, token: str, hosts: Sequence[str], origins: Sequence[str]
    ) -> None:
        self._app = app
        self._token = token
        self._hosts = hosts
        self._origins = origins
        base_path = str(st.get_option("server.baseUrlPath")).strip("/")
        self._base_path = f"/{base_path}" if base_path else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection, or publish the address during the server's lifespan."""
        if scope["type"] != "lifespan":
            app = self._answer(HTTPConnection(scope), receive) or self._app
            await app(scope, receive, send)
            return
        port = st.get_option("server.port")
        addresses = self._addresses(port)
        is_for_others = len(addresses) > 1 or st.get_option("server.address") not in LOCAL_HOSTS
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(published_server(port, addresses[0]))
            except OSError as error:
                log.warning("The address with the token could not be stored: %s.", error)
                is_for_others = True
            if is_for_others:
                sys.stderr.write("".join(f"With the token: {address}\n" for address in addresses))
            await self._app(scope, receive, send)

    def _addresses(self, port: int) -> list[str]:
        """Return the addresses with the token: on this host, then those for others."""
        scheme = "https" if st.get_option("server.sslCertFile") else "http"
        names = [socket.gethostname() if "*" in host else host for host in self._hosts]
        others = [f"{scheme}://{name}:{port}" for name in names if name not in LOCAL_HOSTS]
        origins = [f"{scheme}://localhost:{port}", *others, *self._origins]
        return [f"{origin}{self._base_path}/?token={quote(self._token)}" for origin in origins]

    def _answer(self, request: HTTPConnection, receive: Receive) -> Response | None:
        """Return a refusal, or a redirection to the address without token; None admits."""
        scope = request.scope
        name = f"stepscope-token-{scope['server'][1]}"
        # Of this server only: other servers may have the same token.
        cookie = hmac.new(self._token.encode(), name.encode(), "sha256").hexdigest()
        admitted = (
            scope["path"] == f"{self._base_path}/_stcore/health"
            or self._is_own(request, receive)
            or _equal(request.cookies.get(name), cookie)
            or _equal(request.headers.get("authorization"), f"Bearer {self._token}")
        )
        given = request.query_params.getlist("token") if scope.get("method") == "GET" else []
        if admitted:  # without a cookie, which a browser would send to every port of the host
            return RedirectResponse(_address_without_token(request), 303) if given else None
        if any(_equal(token, self._token) for token in given):
            page = ADMISSION.format(address=html.escape(_address_without_token(request)))
            admission = HTMLResponse(page, headers={"Cache-Control": "no-store"})
            secure = scope["scheme"] == "https"
            admission.set_cookie(name, cookie, httponly=True, samesite="strict", secure=secure)
            return admission
        if scope["path"].startswith("/api/"):
            return JSONResponse({"error": "Authorization: must be Bearer and the token."}, 403)
        return HTMLResponse(REFUSAL, 403)

    def _is_own(self, request: HTTPConnection, receive: Receive) -> bool:
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
