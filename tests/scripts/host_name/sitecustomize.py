"""Makes a process believe that it runs on the host STAND_IN_HOST, whose clock is another one."""

import os
import socket
import time

host = os.environ.get("STAND_IN_HOST")
if host:
    socket.gethostname = lambda: host
    socket.getfqdn = lambda name="": name or host
ahead_s = float(os.environ.get("STAND_IN_CLOCK_S", "0"))
if ahead_s:
    real = time.time
    time.time = lambda: real() + ahead_s
