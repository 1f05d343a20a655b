"""Profiles of a few steps: torch's profiler started and stopped, and what its trace says.

| file                 | what it does                                                         |
|----------------------|----------------------------------------------------------------------|
| `phase_ranges.py`    | names data, forward, backward and optimizer while a profile records  |
| `torch_profiler.py`  | starts and stops torch's profiler, in the thread that trains         |
| `profile_command.py` | the command that records a profile of a few steps                    |
| `chrome_trace.py`    | reads a Chrome trace                                                 |
| `trace_stats.py`     | time and memory by operator and phase; stacks folded into a tree     |
| `summary.py`         | the summary file and the process that makes it of a trace            |

torch is found in `sys.modules`.
"""
