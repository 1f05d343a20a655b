"""Posts one alert to the user's webhook. Its address is a secret, and in no message here."""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from stepscope import __version__
from stepscope.alerts.channels import Webhook

PAUSES_S = (1.0, 4.0)
"""Pauses before the second and third try."""
LATER = (408, 425, 429)
"""Client errors that may pass."""


class _Timed(io.RawIOBase):
    """What a socket receives, until a moment: each wait is what is left of the time."""

    def __init__(self, connected: socket.socket, raw: io.RawIOBase, deadline: float) -> None:
        self._socket, self._raw, self._deadline = connected, raw, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """An answer that must be there in time, however slowly its bytes come.

    The time limit of a socket is one of each read, which a server that sends a byte now and then
    never exceeds.
    """

    def __init__(self, connected: socket.socket, *args: Any, deadline: float, **named: Any) -> None:
        super().__init__(connected, *args, **named)
        raw = self.fp.detach()
        self.fp = io.BufferedReader(_Timed(connected, raw, deadline))


def _connection(kind: type[http.client.HTTPConnection], host: str, **named: Any) -> Any:
    """Return a connection whose whole time, from now on, is its time limit."""
    made = kind(host, **named)
    deadline = time.monotonic() + named["timeout"]
    made.response_class = functools.partial(_Answer, deadline=deadline)  # type: ignore[assignment]
    return made


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        made = functools.partial(_connection, http.client.HTTPConnection)
        return self.do_open(made, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        made = functools.partial(_connection, http.client.HTTPSConnection)
        return self.do_open(made, request, context=_TLS)


# Server certificates are checked against the system's.
_TLS = ssl.create_default_context()
# Only these handlers: no file:, ftp: or data: whatever an answer says, and no redirect is followed,
# which could lead to another scheme or host and would lose the body.
_OPENER = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.ProxyHandler(),
    _Http(),
    _Https(),
    urllib.request.HTTPDefaultErrorHandler(),
    urllib.request.HTTPErrorProcessor(),
):
    _OPENER.add_handler(_handler)


def post(
    webhook: Webhook, stopping: threading.Event, alert: str, wait_s: float | None = None
) -> str | None:
    """Post `alert`, which is JSON; return what went wrong, None for nothing.

    Tried three times where the server may be well later; once, for `wait_s` at most, where that is
    given. A try takes `webhook.timeout_s` at most, but for looking up the host; setting `stopping`
    ends the pauses.
    """
    if wait_s is not None:
        return _post_once(webhook, alert, min(webhook.timeout_s, wait_s))[0]
    problem, passes = _post_once(webhook, alert, webhook.timeout_s)
    for pause_s in PAUSES_S:
        if problem is None or not passes or stopping.wait(pause_s):
            return problem
        problem, passes = _post_once(webhook, alert, webhook.timeout_s)
    return problem


def _post_once(webhook: Webhook, alert: str, timeout_s: float) -> tuple[str | None, bool]:
    """Return what went wrong, and whether it may pass. The body of the answer is not read."""
    headers = {"Content-Type": "application/json", "User-Agent": f"stepscope/{__version__}"}
    request = urllib.request.Request(webhook.url, alert.encode(), headers, method="POST")
    try:
        _OPENER.open(request, timeout=timeout_s).close()
        return None, False
    except urllib.error.HTTPError as error:
        with error:
            code = error.code
        if 300 <= code < 400:
            return f"it redirects (code {code}), which is not followed: use its new address", False
        return f"it answered {code}", code >= 500 or code in LATER
    except TimeoutError:
        return f"no answer within {timeout_s:.3g} s", True
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return f"no answer within {timeout_s:.3g} s", True
        return f"no connection ({_kind(error.reason)})", True
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"no valid answer ({_kind(error)})", True


def _kind(error: object) -> str:
    """Return what an error is, without its text, which may hold the address."""
    return getattr(error, "strerror", None) or type(error).__name__
