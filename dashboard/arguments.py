"""What follows `--` in `streamlit run app.py -- …`: settings that no page may change."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from stepscope.remote.source import sources_from_environment
from trainer.workloads import datasets
from trainer.workloads.custom_file import OPTION, choose

APP = "app.py"


def take_arguments(argv: Sequence[str]) -> None:
    """Put the user's own workload and the data folder into the environment, as whole paths.

    Training may run in a child process with another working directory. `argv` is that of
    `streamlit run`: the script and what follows `--`. Arguments of another program that imports the
    app are left alone. Ends the program with a sentence for arguments, or sources of the
    environment, that cannot be used.
    """
    if os.path.basename(argv[0]) != APP:
        return
    os.environ[datasets.VARIABLE] = str(datasets.data_root())
    parser = argparse.ArgumentParser(prog=f"streamlit run {APP} --", allow_abbrev=False)
    parser.add_argument(OPTION, metavar="PATH.py:FUNCTION", help="a workload of your own")
    options = parser.parse_args(argv[1:])
    try:
        if options.workload is not None:
            choose(options.workload)
        sources_from_environment()
    except ValueError as error:
        parser.exit(2, f"{error}\n")
