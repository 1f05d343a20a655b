"""Will it fit? The peak memory of a run, predicted without running it.

`python -m trainer.memory_estimate --workload gpt --batch-size 64 --json`. The real step is played on fake
tensors, which have a size and no values (`play.py`), every allocation is written down
(`tracker.py`), and the list of them is read as the device's allocator would serve it
(`allocator.py`, `peak.py`).
"""
