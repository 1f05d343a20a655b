"""Puts the page into the wheel: app.py, dashboard/ and trainer/ become stepscope/_app/."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

APP = (
    *("app.py", ".streamlit/config.toml", "dashboard", "trainer"),
    *("examples/h100", "examples/cpu-training", "examples/two-simulated-gpus"),
)


class AppFiles(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the files of the page to a wheel; an editable install uses those of the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Map each file and folder of `APP` into the package."""
        if version == "standard":
            build_data["force_include"].update({path: f"stepscope/_app/{path}" for path in APP})
