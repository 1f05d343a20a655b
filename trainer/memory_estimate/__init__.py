"""Will it fit? The peak memory of a run, predicted without running it.

`python -m trainer.memory_estimate --workload gpt --batch-size 64 --json` runs the real step
on fake tensors, which have a size and no values (`simulate.py`), records every allocation
(`allocation_tracker.py`), and replays them as the device's allocator would serve them
(`allocator.py`, `peak.py`).
"""
