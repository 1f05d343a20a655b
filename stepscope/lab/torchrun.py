"""torchrun of a trial: `python -m stepscope.lab.torchrun TORCHRUN_ARGUMENTS`."""

import importlib
import json
import os
import sys
from collections.abc import Sequence

from stepscope.distributed import ONE_MACHINE
from stepscope.host.child_process import set_parent_death_signal


def main(arguments: Sequence[str]) -> None:
    """Start the ranks on this machine; exit with the name of the rank that failed first."""
    set_parent_death_signal()  # before imports: the sweep may end meanwhile
    from stepscope.watch.trial import TRIAL  # noqa: PLC0415

    limits = json.loads(os.environ[TRIAL])
    os.environ[TRIAL] = json.dumps({**limits, "parent": os.getpid()})
    run = importlib.import_module("torch.distributed.run")
    errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    own = arguments.index("-m") + 2
    # The script's own words stay out of torchrun's parser: it takes --log for --log-dir.
    parsed = run.parse_args([*ONE_MACHINE, *arguments[:own]])
    parsed.training_script_args = list(arguments[own:])
    try:
        run.run(parsed)
    except errors.ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"Rank {rank} ended with exit code {failure.exitcode}.")


if __name__ == "__main__":
    main(sys.argv[1:])
