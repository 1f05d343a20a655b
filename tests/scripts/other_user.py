"""Become another user, then send each request of standard input over a connection of its own.

    python other_user.py UID HOST PORT [--leave | --relay]

The requests are a JSON list of texts. Prints a JSON list of the first line of each answer. With
`--leave` the connections are closed at once, without an answer. With `--relay` it forwards
connections of a free port, printed first, until standard input ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading


def ask(address: tuple[str, int], request: str, leave: bool) -> str:
    """Return the first line of the answer."""
    with socket.create_connection(address, 20) as connection:
        connection.sendall(request.encode())
        if leave:
            return ""
        answer = b""
        while b"\r\n" not in answer and (chunk := connection.recv(65536)):
            answer += chunk
        return answer.decode(errors="replace").partition("\r\n")[0]


def copy(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes until either end is closed."""
    try:
        while chunk := source.recv(65536):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        target.close()


def relay(address: tuple[str, int]) -> None:
    """Forward every connection of a free port to `address`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.write(1, f"{listener.getsockname()[1]}\n".encode())
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(address)
            for pair in ((client, server), (server, client)):
                threading.Thread(target=copy, args=pair, daemon=True).start()


def main() -> None:
    uid, host, port, *options = sys.argv[1:]
    "".encode("idna")  # loaded while the folder of this Python can still be read
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    address = (host, int(port))
    if "--relay" in options:
        threading.Thread(target=relay, args=(address,), daemon=True).start()
        sys.stdin.read()
        return
    requests = json.load(sys.stdin)
    answers = [ask(address, request, "--leave" in options) for request in requests]
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
