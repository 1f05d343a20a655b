"""Posts one alert to the user's webhook. Its address is a secret, and in no message here."""

from __future__ import annotations

import http.client
import threading
import urllib.error
import urllib.request
from typing import Any

from stepscope import __version__
from stepscope.alerts.channels import WebhookChannel

PAUSES_S = (1.0, 4.0)
"""Pauses before the second and third try."""
LATER = (408, 425, 429)
"""Client errors that may pass."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it could lead to another host, and would lose the body."""

    def redirect_request(self, *args: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def post(
    webhook: WebhookChannel, stopping: threading.Event, alert: str, wait_s: float | None = None
) -> str | None:
    """Post `alert`, which is JSON; return what went wrong, None for nothing.

    Tries three times if the failure may pass; once if `wait_s` is given. `webhook.timeout_s` limits
    the connection and each wait for bytes of the answer. Setting `stopping` ends the pauses.
    """
    if wait_s is not None:
        return _post_once(webhook, alert, min(webhook.timeout_s, wait_s))[0]
    problem, passes = _post_once(webhook, alert, webhook.timeout_s)
    for pause_s in PAUSES_S:
        if problem is None or not passes or stopping.wait(pause_s):
            return problem
        problem, passes = _post_once(webhook, alert, webhook.timeout_s)
    return problem


def _post_once(webhook: WebhookChannel, alert: str, timeout_s: float) -> tuple[str | None, bool]:
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
