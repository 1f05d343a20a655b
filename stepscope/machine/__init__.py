"""Every GPU of this machine and the machine itself, looked at once a second, with or without a run.

`Machine.look()` gives a frozen `MachineView` for the terminal (`stepscope devices`) and the page.
"""

from stepscope.machine.machine import Machine
from stepscope.machine.views import DeviceView, HostView, MachineView

__all__ = ["DeviceView", "HostView", "Machine", "MachineView"]
