"""What the driver's error numbers (Xid) mean, and what NVIDIA advises.

Meanings and advice after NVIDIA's catalog for Ampere and newer,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, in our words; numbers that it
calls unused are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

RESTART_APP = "Restart the program."
CHECK_APP = "Restart the program; check it for memory accesses out of bounds."
RESET = "The GPU has to be reset (nvidia-smi --gpu-reset, or a restart of the machine)."
REBOOT = "Restart the machine; if it comes again, check power and seating of the GPU."
IGNORE = "Nothing has to be done now."
IGNORE_ONCE = "Nothing has to be done now; if it comes again, ask the GPU's vendor."
LINK = "The GPU has to be reset; if it comes again, check the NVLink connection."
ECC = "The memory error cannot be corrected: look for Xid 94 or 95, which say how far it reaches."
FOLLOW = "Follow the advice of the errors before it."
VENDOR = "Ask the GPU's vendor if it comes again."


@dataclass(frozen=True, slots=True)
class Meaning:
    """An Xid in words."""

    text: str
    advice: str


_KNOWN: dict[int, Meaning] = {
    8: Meaning("the GPU stopped processing", RESTART_APP),
    11: Meaning("invalid commands were sent to the GPU", CHECK_APP),
    13: Meaning("a kernel caused an exception, such as an access out of bounds", CHECK_APP),
    25: Meaning("invalid commands were sent to the GPU", CHECK_APP),
    31: Meaning("a program accessed GPU memory that is not mapped", CHECK_APP),
    32: Meaning("commands to the GPU were corrupted", CHECK_APP),
    37: Meaning("error of the GPU's firmware", IGNORE_ONCE),
    38: Meaning("error of the GPU's firmware", IGNORE_ONCE),
    39: Meaning("a copy engine failed", RESTART_APP),
    40: Meaning("a copy engine failed", RESTART_APP),
    41: Meaning("a copy engine failed", RESTART_APP),
    43: Meaning("the GPU stopped processing a program, which ended", IGNORE_ONCE),
    44: Meaning("fault while the GPU changed between programs", IGNORE_ONCE),
    45: Meaning("programs were taken off the GPU after an earlier error", FOLLOW),
    46: Meaning("the GPU stopped processing", RESET),
    48: Meaning("a memory error that ECC cannot correct", ECC),
    54: Meaning("the GPU's power cable is not connected", "Connect the power cable."),
    62: Meaning("the GPU's power controller halted", RESET),
    63: Meaning("a bad row of memory was recorded to be replaced", IGNORE),
    64: Meaning("a bad row of memory could not be replaced", RESET),
    66: Meaning("illegal access by the driver", IGNORE_ONCE),
    67: Meaning("illegal access by the driver", IGNORE_ONCE),
    68: Meaning("the video decoder failed", RESTART_APP),
    69: Meaning("a program used the GPU's engine wrongly", CHECK_APP),
    74: Meaning("error of an NVLink connection", LINK),
    78: Meaning("a virtual GPU could not start", "Update the driver and the vGPU software."),
    79: Meaning("the GPU has fallen off the bus", REBOOT),
    80: Meaning("corrupted data was sent to the GPU", CHECK_APP),
    92: Meaning("many memory errors that ECC corrected", IGNORE_ONCE),
    93: Meaning("the GPU's settings memory is written too often", IGNORE_ONCE),
    94: Meaning("a memory error that reached one program only", RESTART_APP),
    95: Meaning("a memory error that may have reached several programs", RESET),
    109: Meaning("the GPU did not change between programs in time", RESET),
    110: Meaning("security fault", RESET),
    119: Meaning("the GPU's system processor (GSP) did not answer", RESET),
    120: Meaning("error of the GPU's system processor (GSP)", RESET),
    121: Meaning("error of the link between GPU and CPU", IGNORE_ONCE),
    136: Meaning("an NVLink connection could not be set up", LINK),
    137: Meaning("a program accessed memory over NVLink without the right to", CHECK_APP),
    140: Meaning("memory errors that ECC cannot correct", RESET),
    141: Meaning("error on CUDA's fast path", IGNORE_ONCE),
    143: Meaning("the GPU could not be started", RESET),
    151: Meaning("the encryption key could not be changed", "Restart the virtual machine."),
    154: Meaning(
        "the driver has changed what it wants done about the GPU",
        "The page Devices and nvidia-smi -q say what.",
    ),
    155: Meaning("error of an NVLink connection", LINK),
    156: Meaning("a part of the GPU was put out of use", RESET),
    157: Meaning("a part of the GPU could not be put out of use", IGNORE_ONCE),
    158: Meaning("the GPU did not answer in time", RESET),
}
_COPY_ENGINES = {70, 71, 72, 75, 76, 77, 85, *range(126, 136)}
_MEDIA = {60, 82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142}
_NVLINK5 = range(144, 151)


def meaning(code: int) -> Meaning:
    """Return what an Xid means; of one that the catalog does not explain, just that."""
    if code in _KNOWN:
        return _KNOWN[code]
    if code in _COPY_ENGINES:
        return Meaning("a copy engine failed", RESTART_APP)
    if code in _MEDIA:
        return Meaning("an engine for video or pictures failed", RESTART_APP)
    if code in _NVLINK5:
        return Meaning("error of an NVLink connection", LINK)
    return Meaning("an error that NVIDIA's catalog does not explain", VENDOR)
