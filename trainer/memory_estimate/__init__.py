"""The memory of a run, measured: one probe trains for three steps in a child process."""

from stepscope.common.config_issue import ConfigIssue
from trainer.config import RunConfig


class ProbeError(Exception):
    """A probe without a result; the message is a sentence with the reason."""


def probe_problem(config: RunConfig) -> ConfigIssue | None:
    """Return why the memory of this run is not measured; None if it is."""
    if not config.distributed:
        return None
    reason = "the probe is one process, and a rank's memory depends on the number of ranks"
    remedy = "Set it to none to measure 1 device, or start the job and read its Memory tab"
    return ConfigIssue("strategy", reason, remedy)
