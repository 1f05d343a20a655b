"""A rank of a training of ours, under torchrun: rank_training.py FOLDER PARALLEL DEVICE."""

import os
import sys
from pathlib import Path

from stepscope.run import RunStatus
from trainer.config import RunConfig, Runner, Strategy
from trainer.runners.training_run import run

folder, parallel, device = Path(sys.argv[1]), Strategy(sys.argv[2]), sys.argv[3]
config = RunConfig(
    device=device,
    runner=Runner.TORCHRUN,
    strategy=parallel,
    devices_per_node=int(os.environ["WORLD_SIZE"]),
    batch_size=64,
    epochs=1000,
    channels_last=False,
)
folder.mkdir(parents=True, exist_ok=True)
status = run(config, folder)
sys.stdout.flush()
os._exit(status not in (RunStatus.FINISHED, RunStatus.STOPPED))
