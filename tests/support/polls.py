"""What a poll of a run answers, of services in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from dashboard import services
from dashboard.api.routes import get_series


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> services.Services:
    made = services.Services(tmp_path, tmp_path / "none")
    made.devices()
    monkeypatch.setattr(services, "get", lambda: made)
    return made


def poll(run: str) -> dict[str, Any]:
    query = f"run={run}".encode()
    answer = get_series(Request({"type": "http", "query_string": query, "headers": []}))
    told: dict[str, Any] = json.loads(answer.body)
    assert answer.status_code == 200, told
    return told
