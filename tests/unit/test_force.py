"""Which parent of a rank is one that starts ranks, and ends with them."""

import pytest

from stepscope.session.stop import starts_ranks


@pytest.mark.parametrize(
    "line",
    [
        "/opt/env/bin/python3.11 /opt/env/bin/torchrun --nproc-per-node 2 train.py",
        "torchrun train.py",
        "python -u -m torch.distributed.run train.py",
        "python -m trainer.runners.agent --nnodes 1",
        "/usr/bin/python3 /usr/bin/accelerate launch train.py",
        "python -m accelerate.commands.launch train.py",
    ],
)
def test_programs_that_start_ranks(line: str) -> None:
    assert starts_ranks(line)


@pytest.mark.parametrize(
    "line",
    [
        "bash -c torchrun train.py",
        "/bin/bash /home/torchrun-me/accelerate/start.sh",
        "vim torchrun",
        "python notebook.py --with torchrun",
        "python -c torchrun",
        "python /home/accelerate/train.py -m torch.distributed.run",
        "tmux new -s torchrun",
        "python",
        "",
    ],
)
def test_programs_that_only_name_one(line: str) -> None:
    assert not starts_ranks(line)
