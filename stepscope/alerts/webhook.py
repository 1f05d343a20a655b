"""Posts one alert to the user's webhook. Its address is a secret, and in no message here."""

from __future__ import annotations

import http.client
import threading
import urllib.error
import urllib.request

from stepscope import __version__
from stepscope.alerts.ways import Webhook

PAUSES_S = (1.0, 4.0)
"""Pauses before the second and third try."""
LATER = (408, 425, 429)
"""Client errors that may pass."""
ANSWER_READ = 1024


# Only these handlers: no file:, ftp: or data: whatever an answer says, and no redirect is followed,
# which could lead to another scheme or host and would lose the body.
_OPENER = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.ProxyHandler(),
    urllib.request.HTTPHandler(),
    urllib.request.HTTPSHandler(),
    urllib.request.HTTPDefaultErrorHandler(),
    urllib.request.HTTPErrorProcessor(),
):
    _OPENER.add_handler(_handler)


def post(webhook: Webhook, stopping: threading.Event, alert: str) -> str | None:
    """Post `alert`, which is JSON; return what went wrong, None for nothing.

    Tried three times where the server may be well later. Each wait for the server is
    `webhook.timeout_s` at most; setting `stopping` ends the pauses.
    """
    problem, passes = _post_once(webhook, alert)
    for pause_s in PAUSES_S:
        if problem is None or not passes or stopping.wait(pause_s):
            return problem
        problem, passes = _post_once(webhook, alert)
    return problem


def _post_once(webhook: Webhook, alert: str) -> tuple[str | None, bool]:
    """Return what went wrong, and whether it may pass."""
    headers = {"Content-Type": "application/json", "User-Agent": f"stepscope/{__version__}"}
    request = urllib.request.Request(webhook.url, alert.encode(), headers, method="POST")
    try:
        with _OPENER.open(request, timeout=webhook.timeout_s) as answer:
            answer.read(ANSWER_READ)
        return None, False
    except urllib.error.HTTPError as error:
        with error:
            code = error.code
        if 300 <= code < 400:
            return f"it redirects (code {code}), which is not followed: use its new address", False
        return f"it answered {code}", code >= 500 or code in LATER
    except TimeoutError:
        return f"no answer within {webhook.timeout_s:g} s", True
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return f"no answer within {webhook.timeout_s:g} s", True
        return f"no connection ({_kind(error.reason)})", True
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"no valid answer ({_kind(error)})", True


def _kind(error: object) -> str:
    """Return what an error is, without its text, which may hold the address."""
    return getattr(error, "strerror", None) or type(error).__name__
