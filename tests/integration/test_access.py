"""A real server admits its own user and root; everybody else needs the token."""

from __future__ import annotations

import base64
import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboard import live_chart
from stepscope.host.servers import loopback_owner, published_server, servers_folder
from tests.support.child_process import run_python
from tests.support.commanded_runs import asked, live_run
from tests.support.other_user import NOBODY, SOMEBODY, needs_root, send_as
from tests.support.server import ROOT, Server, start_server, stop_server

TOKEN = "a-token-for-these-tests"
UPGRADE = (
    *("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
    f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}",
)


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def request(server: Server, path: str, *lines: str, method: str = "GET", body: str = "") -> str:
    """Return the text of a request from the page's own origin."""
    host = f"localhost:{port_of(server)}"
    own = [f"Host: {host}", f"Origin: http://{host}", f"Content-Length: {len(body)}"]
    closing = [] if lines[:1] == UPGRADE[:1] else ["Connection: close"]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *own, *closing, *lines, "", body])


def command(server: Server, number: int, *lines: str) -> str:
    body = json.dumps({"run": "live", "name": "pause", "args": {}, "id": number})
    return request(server, "/api/command", *lines, method="POST", body=body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the default settings and a live run."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "runs").mkdir()
    made = start_server(folder, CUDA_VISIBLE_DEVICES="", STEPSCOPE_TOKEN=TOKEN)
    live_run(made.runs / "live")
    yield made
    stop_server(made)


@pytest.fixture(scope="module")
def network_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that listens on every address, IPv4 and IPv6."""
    folder = tmp_path_factory.mktemp("network")
    made = start_server(
        folder,
        CUDA_VISIBLE_DEVICES="",
        STREAMLIT_SERVER_ADDRESS="::",
        STREAMLIT_SERVER_ALLOWED_HOSTS="localhost example.test",
    )
    yield made
    stop_server(made)


@pytest.fixture(scope="module")
def routes() -> list[tuple[str, str, list[str]]]:
    """Kind, path and methods of every route."""
    script = ROOT / "tests" / "scripts" / "list_routes.py"
    listed = json.loads(run_python(str(script)).stdout)
    return [(kind, path, methods) for kind, path, methods in listed]


@needs_root
def test_another_user_is_refused_on_every_route(
    server: Server, routes: list[tuple[str, str, list[str]]]
) -> None:
    requests = []
    for kind, path, methods in routes:
        address = "/" + path.strip("/").replace("{path:path}", "x").replace("{file_id:path}", "x")
        lines = UPGRADE if kind == "WebSocketRoute" else ()
        for method in methods:
            requests.append(request(server, address, *lines, method=method))
    assert len(requests) > 40
    assert any("Upgrade" in each for each in requests)
    for path in ("/lab", "/app/static/x", "/_stcore/health/", "/x/../lab", "/api/series?run=live"):
        requests.append(request(server, path))
    answers = send_as(NOBODY, port_of(server), requests)
    admitted = [
        (text.partition("\r\n")[0], answer)
        for text, answer in zip(requests, answers, strict=True)
        if answer != "HTTP/1.1 403 Forbidden"
    ]
    assert admitted == []


@needs_root
@pytest.mark.parametrize("uid", [NOBODY, SOMEBODY])
def test_another_user_cannot_pose_as_the_owner(server: Server, uid: int) -> None:
    port = port_of(server)
    with socket.create_connection(("127.0.0.1", port)) as own:
        host, own_port = own.getsockname()
        own.sendall(request(server, "/api/series").encode())
        spoofed = [
            f"X-Forwarded-For: {host}:{own_port}",
            f"X-Forwarded-For: [::1]:{own_port}",
            f"X-Forwarded-For: ::ffff:{host}, {host}:{own_port}",
            f"Forwarded: for={host}:{own_port}",
            f"X-Real-IP: {host}",
            f"X-Forwarded-For: {host}:{own_port}\r\nX-Forwarded-Proto: https",
            "Authorization: Bearer",
            "Authorization: Bearer a-token",
            f"Cookie: stepscope-token-{port}={TOKEN}",
            f"Cookie: stepscope-token-{port}=",
        ]
        requests = [request(server, "/api/series", line) for line in spoofed]
        requests += [request(server, "/_stcore/stream", *UPGRADE, line) for line in spoofed]
        requests += [request(server, "/?token="), request(server, "/?token=a-token")]
        assert set(send_as(uid, port, requests)) == {"HTTP/1.1 403 Forbidden"}


@needs_root
def test_commands_of_another_user_are_not_sent_even_if_the_connection_is_closed_at_once(
    server: Server,
) -> None:
    commands = [command(server, number) for number in range(100, 120)]
    pipelined = [request(server, "/_stcore/health").replace("close", "keep-alive") + commands[0]]
    port = port_of(server)
    send_as(NOBODY, port, [*commands, *pipelined], leave=True)
    send_as(NOBODY, port, [*commands, *pipelined])
    assert status(server, command(server, 1)) == 200
    assert [number for number, *_ in asked(server.runs / "live")] == [1]
    with_token = command(server, 2, f"Authorization: Bearer {TOKEN}")
    assert send_as(NOBODY, port, [with_token]) == ["HTTP/1.1 200 OK"]
    assert [number for number, *_ in asked(server.runs / "live")] == [1, 2]


def answer(server: Server, text: str, host: str = "127.0.0.1") -> str:
    """Return the head of the answer to this user."""
    received = b""
    with socket.create_connection((host, port_of(server)), 20) as connection:
        connection.sendall(text.encode())
        while b"\r\n\r\n" not in received and (chunk := connection.recv(65536)):
            received += chunk
    return received.decode(errors="replace")


def status(server: Server, text: str, host: str = "127.0.0.1") -> int:
    return int(answer(server, text, host).split()[1])


def test_the_servers_user_needs_no_token(server: Server) -> None:
    for path in ("/", "/lab", "/api/series", "/_stcore/host-config"):
        assert status(server, request(server, path)) == 200, path
    assert status(server, request(server, "/_stcore/stream", *UPGRADE)) == 101
    assert status(server, request(server, "/api/absent")) == 404
    # From a proxy, which other users may reach too.
    proxied = request(server, "/api/series", "X-Forwarded-For: 10.0.0.9")
    assert status(server, proxied) == 403


def test_only_the_pages_own_origin_opens_the_websocket(server: Server) -> None:
    port = port_of(server)
    text, own = request(server, "/_stcore/stream", *UPGRADE), f"http://localhost:{port}"
    assert status(server, text.replace(f"Origin: {own}\r\n", "")) == 101, "no browser"
    for origin in (
        f"http://localhost:{port + 1}",
        f"http://127.0.0.1:{port}",
        "http://localhost",
        f"http://localhost.evil.example:{port}",
        "null",
    ):
        foreign = text.replace(f"Origin: {own}\r\n", f"Origin: {origin}\r\n")
        assert status(server, foreign) == 403, origin


def test_no_page_may_frame_an_answer(server: Server) -> None:
    api = ("/api/series", "/api/absent")
    for path in ("/", "/runs", "/_stcore/health", *api, live_chart.PLOTLY_URL):
        lines = answer(server, request(server, path)).lower().splitlines()
        assert "content-security-policy: frame-ancestors 'none'" in lines, path


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "127.0.0.3"])
def test_a_server_on_every_address_knows_users_of_the_loopback_interface(
    network_server: Server, host: str
) -> None:
    text = request(network_server, "/api/series")
    assert status(network_server, text, host) == 200
    (refused,) = send_as(SOMEBODY, port_of(network_server), [text], host)
    assert refused == "HTTP/1.1 403 Forbidden"


def test_the_address_of_a_running_server_is_in_a_private_file(
    server: Server, network_server: Server
) -> None:
    ports = port_of(server), port_of(network_server)
    folder = servers_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [folder / f"{port}.json" for port in ports]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    own, network = (json.loads(file.read_text()) for file in files)
    assert own == {"url": f"{server.url}/?token={TOKEN}", "pid": server.process.pid}
    token = network["url"].rpartition("=")[2]
    assert len(token) == 32
    printed = network_server.log.read_text()
    assert f"http://example.test:{ports[1]}/?token={token}" in printed
    assert TOKEN not in server.log.read_text()


def test_the_token_is_not_written_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    servers_folder().mkdir(parents=True)
    planted, elsewhere = servers_folder() / "8501.json", tmp_path / "elsewhere"
    planted.symlink_to(elsewhere)
    with published_server(8501, "http://localhost:8501/?token=secret"):
        assert "secret" in planted.read_text()
        assert not planted.is_symlink()
    assert not elsewhere.exists()


def test_an_address_that_is_not_loopback_has_no_owner() -> None:
    assert loopback_owner(("10.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert loopback_owner(("127.0.0.1", 1), ("10.0.0.1", 2)) is None
    assert loopback_owner(("::ffff:10.0.0.1", 1), ("::1", 2)) is None
