"""The memory estimate of a run that is not started: `python -m trainer.memory_estimate`."""
