"""Profiles of a few steps: torch's profiler started and stopped, and what its trace says.

| file           | what it does                                                               |
|----------------|----------------------------------------------------------------------------|
| `ranges.py`    | names data, forward, backward and optimizer while a profile is recorded    |
| `labels.py`    | the same for a history of CUDA allocations                                 |
| `capture.py`   | starts and stops torch's profiler, in the thread that trains               |
| `write.py`     | a process of its own: compresses the trace and writes the summary          |
| `trace.py`     | reads a chrome trace                                                       |
| `operators.py` | time and memory by operator                                                |
| `phases.py`    | the shares of data, forward, backward and optimizer                        |
| `flame.py`     | stacks folded into a tree                                                  |
| `summary.py`   | the summary file: made of a trace, and read with care                      |

torch is found in `sys.modules`.
"""
