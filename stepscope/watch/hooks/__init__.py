"""Zero-code capture: what `stepscope watch` records of a script that knows nothing of Stepscope.

`install(session)` is called before the script runs. It imports nothing: an import hook waits until
the script has imported torch, so that environment variables set before it still count, and then
wraps a handful of torch's functions:

| file           | wraps                                    | metrics                             |
|----------------|------------------------------------------|-------------------------------------|
| `optimizer.py` | the post hook of all optimizers' `step`  | a row a step, `train/lr`            |
| `loss.py`      | `torch.autograd.backward`, `zero_grad`,  | `train/loss`, `train/backwards`     |
|                | `Optimizer.__init__`                     |                                     |
| `gradient.py`  | `torch.nn.utils.clip_grad_norm_`         | `train/grad_norm`                   |
| `amp.py`       | `GradScaler.scale`, `GradScaler.step`    | `train/amp_scale`, `…/amp_skipped`  |
| `data.py`      | `__next__` of the DataLoader's iterators | data wait, samples/s, `train/epoch` |
| `phases.py`    | `DistributedDataParallel.__init__` (jobs)| `perf/forward`, `perf/comm_wait`, … |
| `transfer.py`  | `to`, `cuda` of tensors (only CUDA)      | `perf/h2d`                          |

`State` is what they share. `times.py` has a step's times, `passes.py` its batches and epoch,
`parties.py` which of several optimizers a loss belongs to, `by_hand.py` the steps of scripts
without an optimizer.

No wrapper waits for a GPU or changes a result. One that fails says so once and is off from then
on; the script never notices. They work in one thread, the one that steps the optimizers, and are
off in forked children and DataLoader workers. docs/watch.md lists what they cannot see.
"""

from __future__ import annotations

from stepscope.watch.hooks.install import Hooks, install

__all__ = ["Hooks", "install"]
