"""Who is admitted, without a server: by the owner of the connection, by the token, by neither."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from dashboard.api import access
from dashboard.api.access import AccessControl, server_token

TOKEN = "0123456789abcdef"


async def page(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer everything."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close"})
    else:
        await PlainTextResponse(Request(scope).url.path)(scope, receive, send)


class Connected:
    """ASGI server's part: passes requests on with the `receive` of a connection, as uvicorn."""

    def __init__(self, app: ASGIApp, connection: socket.socket) -> None:
        self._app = app
        self.transport = self
        self._connection = connection
        self._receive: Receive | None = None

    def get_extra_info(self, name: str) -> Any:
        return {"socket": self._connection}[name]

    async def receive(self) -> Message:
        assert self._receive is not None
        return await self._receive()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        await self._app(scope, self.receive, send)


def guarded() -> AccessControl:
    return AccessControl(page, TOKEN)


def client_of(app: ASGIApp) -> TestClient:
    return TestClient(app, base_url="http://localhost", follow_redirects=False)


@pytest.fixture
def connection() -> Any:
    """The server's end of a connection of this process."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as served,
    ):
        yield served


@pytest.mark.parametrize(
    ("owner", "status"),
    [(1234, 200), (0, 200), (4321, 403), (None, 403)],
    ids=["same user", "root", "another user", "unknown"],
)
def test_the_owner_of_the_connection_decides(
    monkeypatch: pytest.MonkeyPatch, connection: socket.socket, owner: int | None, status: int
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(access, "loopback_owner", lambda *_: owner)
    client = client_of(Connected(guarded(), connection))
    assert [client.get("/lab").status_code for _ in range(2)] == [status, status]


def test_a_connection_that_was_reset_belongs_to_nobody(
    monkeypatch: pytest.MonkeyPatch, connection: socket.socket
) -> None:
    """Its port may already be that of the server's user."""

    def reset(*_: Any) -> int:
        connection.close()
        return os.geteuid()

    monkeypatch.setattr(access, "loopback_owner", reset)
    assert client_of(Connected(guarded(), connection)).get("/").status_code == 403


def test_a_request_through_a_proxy_needs_the_token(connection: socket.socket) -> None:
    client = client_of(Connected(guarded(), connection))
    assert client.get("/").status_code == 200
    proxied = {"X-Forwarded-For": "127.0.0.1"}
    assert client.get("/", headers=proxied).status_code == 403
    for header in ("Forwarded", "Via", "X-Real-IP"):
        assert client.get("/", headers={header: "for=127.0.0.1"}).status_code == 403, header
    assert client.get(f"/?token={TOKEN}", headers=proxied).status_code == 303


def test_without_a_connection_the_token_is_needed() -> None:
    client = client_of(guarded())
    assert client.get("/lab").status_code == 403
    assert set(client.post("/api/command").json()) == {"error"}
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/_stcore/stream"):
        pass
    for wrong in ("", "Bearer", "Bearer x", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}é"):
        headers = {"Authorization": wrong.encode()}
        assert client.get("/api/series", headers=headers).status_code == 403, wrong  # type: ignore[arg-type]
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert client.get("/api/series", headers=right).text == "/api/series"
    with client.websocket_connect("/_stcore/stream", headers=right):
        pass


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("/?token={}", "./"),
        ("/lab?run=one&token={}", "./lab?run=one"),
        ("/base/lab?token={}&token=x&a=%26", "./lab?a=%26"),
        ("//evil.test?token={}", "./evil.test"),
        ("/%5Cevil.test?token={}", "./%5Cevil.test"),
        ("/javascript:alert?token={}", "./javascript%3Aalert"),
    ],
)
def test_the_token_leaves_the_address(address: str, target: str) -> None:
    client = client_of(guarded())
    answer = client.get(f"http://localhost:8501{address.format(TOKEN)}")
    assert (answer.status_code, answer.headers["location"]) == (303, target)
    cookie, *flags = answer.headers["set-cookie"].split("; ")
    assert {flag.lower() for flag in flags} == {"httponly", "samesite=lax", "path=/"}
    name, _, value = cookie.partition("=")
    assert name == "stepscope-token-8501"
    assert TOKEN not in value
    assert client.get("http://localhost:8501/lab").status_code == 200
    client.cookies = {name.replace("8501", "8502"): value}  # type: ignore[assignment]
    assert client.get("http://localhost:8502/lab").status_code == 403, "a cookie of another server"


def test_the_servers_user_gets_no_cookie(connection: socket.socket) -> None:
    """Which a browser would send to all ports of the host."""
    client = client_of(Connected(guarded(), connection))
    for token in (TOKEN, "wrong"):
        answer = client.get(f"/lab?token={token}")
        assert (answer.status_code, answer.headers["location"]) == (303, "./lab")
        assert "set-cookie" not in answer.headers


def test_with_https_the_cookie_is_sent_by_https_only() -> None:
    for scheme, count in (("http", 0), ("https", 1)):
        client = TestClient(guarded(), base_url=f"{scheme}://localhost", follow_redirects=False)
        sent = client.get(f"/?token={TOKEN}").headers["set-cookie"]
        assert sent.lower().split("; ").count("secure") == count


def test_a_wrong_token_is_refused() -> None:
    client = client_of(guarded())
    for wrong in ("", "0123456789abcde", "0123456789abcdefg", "%C3%A9", "%ff"):
        answer = client.get(f"/?token={wrong}")
        assert answer.status_code == 403, wrong
        assert "set-cookie" not in answer.headers
    assert client.post(f"/lab?token={TOKEN}").status_code == 403
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect(f"/_stcore/stream?token={TOKEN}"),
    ):
        pass


def test_a_token_is_random_or_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPSCOPE_TOKEN", raising=False)
    assert len({server_token() for _ in range(3)}) == 3
    monkeypatch.setenv("STEPSCOPE_TOKEN", TOKEN)
    assert server_token() == TOKEN
    assert "STEPSCOPE_TOKEN" not in os.environ, "for child processes"
    for short in (TOKEN[1:], "é" * 20):
        monkeypatch.setenv("STEPSCOPE_TOKEN", short)
        with pytest.raises(SystemExit, match="STEPSCOPE_TOKEN: must have"):
            server_token()
