"""`stepscope exporter`: Prometheus metrics of this machine's GPUs and of live runs over HTTP."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from stepscope.cli import CommandError
from stepscope.cli.arguments import number_type

PORT = 9849

EXAMPLES = (
    "stepscope exporter",
    "stepscope exporter --address 0.0.0.0 --port 9900    for a Prometheus on another host",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.add_argument(
        "--port",
        type=number_type(0, 65_535, int),
        default=PORT,
        metavar="N",
        help=f"TCP port, 0 for a free one (default: {PORT})",
    )
    parser.add_argument(
        "--address", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )


def run(options: argparse.Namespace, root: Path) -> int:
    """Serve until Ctrl-C. Raises CommandError if the server cannot start."""
    try:
        from stepscope.export.prometheus import ExporterCollector, open_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        raise CommandError(
            "stepscope exporter: needs the package prometheus-client, which is not installed. "
            "Run 'pip install prometheus-client'."
        ) from error
    from stepscope.gpu.machine_monitor import MachineMonitor
    from stepscope.gpu.source import open_source

    # A DCGM exporter may read the activity counters.
    machine = MachineMonitor(functools.partial(open_source, reads_activity=False))
    collector = ExporterCollector(root, machine)
    try:
        server = open_server(collector, options.address, options.port)
    except OSError as error:
        place = f"{options.address} port {options.port}"
        text = f"--address, --port: cannot listen ({error.strerror}), got {place}."
        raise CommandError(text) from error
    address = f"http://{options.address}:{server.server_address[1]}/metrics"
    print(f"Metrics of the GPUs and of {root}: {address}", flush=True)
    with server:
        server.serve_forever()
    return 0
