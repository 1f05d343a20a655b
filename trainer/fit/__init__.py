"""The former name of `trainer.memory_estimate`."""
