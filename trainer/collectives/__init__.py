"""Benchmark of this machine's collectives: `python -m trainer.collectives`."""
