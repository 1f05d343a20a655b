"""The page's script under AppTest, with run folders of its own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from dashboard import services
from tests.support.app_page import NO_GPU, Learn, Machine, OpenPage, at_address
from trainer.training.config_validation import TrainDevice

MAIN = Path(__file__).resolve().parents[2] / "dashboard" / "main.py"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server finds runs."""
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path))


@pytest.fixture
def server(sources: None, caplog: pytest.LogCaptureFixture) -> Iterator[services.Services]:
    """The services that the page under test gets."""
    # Outside `streamlit run` every cached call warns that there is no session.
    caplog.set_level(logging.ERROR, "streamlit")
    st.cache_resource.clear()
    server = services.get()
    server.devices()
    yield server
    server.close()
    st.cache_resource.clear()
    st.cache_data.clear()


@pytest.fixture
def page(server: services.Services) -> OpenPage:
    """Run the page with URL parameters; no run of it may end in an exception."""

    def run(**params: str) -> AppTest:
        app = AppTest.from_file(str(MAIN), default_timeout=30)
        for name, value in params.items():
            app.query_params[name] = value
        app.run()
        assert not app.exception
        return app

    return run


@pytest.fixture
def machine(server: services.Services, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make the page find these GPUs and the CPU."""

    def has(*gpus: TrainDevice) -> None:
        cpu = next(device for device in server.devices().devices if device.id == "cpu")
        found = services.Devices([*gpus, cpu], None if gpus else NO_GPU)
        monkeypatch.setattr(server, "devices", lambda: found)

    return has


@pytest.fixture
def learn(page: OpenPage) -> Learn:
    """Open the Learn page with these URL parameters."""

    return functools.partial(at_address, page, "learn")
