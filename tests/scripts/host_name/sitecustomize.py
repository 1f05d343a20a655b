"""Makes a process believe that it runs on the host STAND_IN_HOST."""

import os
import socket

host = os.environ.get("STAND_IN_HOST")
if host:
    socket.gethostname = lambda: host
    socket.getfqdn = lambda name="": name or host
