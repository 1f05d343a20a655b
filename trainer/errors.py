"""The failure of a run that workloads and training explain themselves."""


class RunFailedError(Exception):
    """An expected failure of a run; its message is complete without a traceback."""
