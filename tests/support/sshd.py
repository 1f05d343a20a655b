"""An ssh server of this user on the loopback address, and a proxy that delays a connection."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepscope.host.child_process import free_port, wait_until_it_listens

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


@contextmanager
def ssh_server(folder: Path) -> Iterator[str]:
    """Yield the ssh command that reaches the server as the host "far"."""
    assert SSHD is not None, "sshd: install openssh-server"
    folder.mkdir(parents=True)
    for key in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    port = free_port()
    assert port is not None
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin yes\n"
    )
    (folder / "config").write_text(
        f"Host far slow\nHostName 127.0.0.1\nPort {port}\nIdentityFile {folder}/user_key\n"
        f"IdentitiesOnly yes\nUserKnownHostsFile {folder}/known\nStrictHostKeyChecking no\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with open(folder / "sshd.log", "wb") as log:
        server = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log, stdout=log
        )
    try:
        assert wait_until_it_listens(server.pid, port)
        yield f"ssh -F {folder / 'config'}"
    finally:
        server.kill()
        server.wait()


@contextmanager
def delayed(port: int, delay_s: float) -> Iterator[int]:
    """Yield the port of a proxy that delays each direction by `delay_s`."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []
    copiers: list[threading.Thread] = []

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(delay_s)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                connections.extend((near, far))
                for pair in ((near, far), (far, near)):
                    copiers.append(threading.Thread(target=copy, args=pair))
                    copiers[-1].start()

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for copier in copiers:
            copier.join()
        for each in (listener, *connections):
            each.close()
