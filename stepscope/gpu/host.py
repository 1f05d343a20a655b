"""The machine around the GPUs: names and versions once, memory and CPU at each look."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import socket
import sys

from stepscope.gpu.machine_state import HostView
from stepscope.host.environment import cpu_name
from stepscope.host.usage import HostSource


class Host:
    """Reads this machine; always from the same thread, for the sake of the CPU's share."""

    def __init__(self) -> None:
        self._source = HostSource()

    def look(self, driver: str | None, cuda: str | None) -> HostView:
        """Return the machine now; `driver` and `cuda` are the versions that NVML told."""
        values = self._source.host()
        return HostView(
            name=socket.gethostname(),
            cpu=cpu_name(),
            cores=os.cpu_count(),
            platform=platform.platform(),
            python=platform.python_version(),
            torch=torch_version(),
            driver=driver,
            cuda=cuda,
            cpu_percent=values.get("host/cpu"),
            memory_used=values["host/mem_used"],
            memory_total=values["host/mem_total"],
        )


def torch_version() -> str | None:
    """Return the version of torch without importing it; None where it is not installed."""
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    return _installed_torch() if loaded is None else str(loaded)


@functools.cache  # looks through the folders of all packages
def _installed_torch() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
