"""The peak memory of a run, predicted without running it: `python -m trainer.memory_estimate`.

The real step runs on fake tensors, which have no values (`simulate.py`); its allocations
(`allocation_tracker.py`) go through a model of the device's allocator (`allocator.py`, `peak.py`).
"""
