"""`stepscope ui`: this process becomes the dashboard of the caller's runs."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
from pathlib import Path

from stepscope.cli import CommandError, app_process
from stepscope.cli.arguments import number_type
from stepscope.remote.source import SOURCES, parse_source, sources_from_environment

EXAMPLES = (
    "stepscope ui",
    "stepscope ui --port 8600 --no-browser",
    "stepscope ui ssh://login1/scratch/me/runs /mnt/team/runs",
    "stepscope ui --workload my_model.py:build",
    "stepscope ui -- --server.baseUrlPath stepscope",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add_server_options(parser)
    add = parser.add_argument
    add("--workload", metavar="PATH.py:FUNCTION", help="a workload of your own, to train")
    add(
        "arguments",
        nargs="*",
        metavar="SOURCE … -- ARGUMENT",
        help="more runs to show, as ssh://host/path or a folder; arguments for 'streamlit run'",
    )


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a server."""
    port = number_type(1, 65_535, int)
    parser.add_argument(
        "--port", type=port, metavar="N", help="port (the first free one from 8501)"
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")


def run(options: argparse.Namespace, root: Path) -> int:
    """Become the server, so that signals and the exit code are its own. Raises CommandError."""
    words = ["--server.port", str(options.port)] if options.port else []
    words += ["--server.headless", "true"] if options.no_browser else []
    given = list(itertools.takewhile(lambda word: word[:1] != "-", options.arguments))
    try:
        sources = [parse_source(text) for text in given] or sources_from_environment()
    except ValueError as error:
        raise CommandError(str(error), 2) from error
    if sources:
        # The server runs in another folder.
        os.environ[SOURCES] = json.dumps([str(source) for source in sources])
    words += options.arguments[len(given) :]
    if options.workload:
        separator = [] if "--" in words else ["--"]
        words += [*separator, "--workload", os.path.abspath(options.workload)]
    return serve(words, root)


def serve(words: list[str], root: Path) -> int:
    """Become the server with these arguments of Streamlit. Raises CommandError."""
    reason = app_process.missing(app_process.PAGE)
    if reason is not None:
        raise CommandError(reason)
    if root == Path("runs").absolute():  # not named by the user
        with contextlib.suppress(OSError):  # the page says why it cannot be read
            root.mkdir(exist_ok=True)
    # The server runs in another folder, where a relative path would be wrong.
    data = os.path.abspath(os.environ.get("STEPSCOPE_DATA") or "data")
    variables = {"STEPSCOPE_RUNS": str(root.resolve()), "STEPSCOPE_DATA": data}
    if (alerts := os.environ.get("STEPSCOPE_ALERTS", "")) not in {"", "off"}:
        variables["STEPSCOPE_ALERTS"] = os.path.abspath(os.path.expanduser(alerts))
    if workload := os.environ.get("STEPSCOPE_WORKLOAD"):
        variables["STEPSCOPE_WORKLOAD"] = os.path.abspath(workload)
    app_process.become_server(words, variables)
    return 0
