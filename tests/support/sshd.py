"""An ssh server of this user on the loopback address."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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
        f"Host far\nHostName 127.0.0.1\nPort {port}\nIdentityFile {folder}/user_key\n"
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
