"""HTTP routes of the dashboard, answered from the run folder without a Streamlit session.

All routes but `/api/command` only read. Handlers are plain functions, so that Starlette runs them
in worker threads: SQLite must not block the event loop of all sessions.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from dashboard import live_chart, services
from dashboard.charts import series
from dashboard.charts.run_view import state
from dashboard.controls.actions import END_NOW, can_end_now, refusal
from dashboard.ranks.job_ranks import used_gpus
from dashboard.run_files import profiles, snapshots
from dashboard.run_list import Listing
from dashboard.sources import source_state
from stepscope.profiling.profile_command import STEPS_LIMIT
from stepscope.remote.access import read_only_reason
from stepscope.run import RunError, RunInfo, RunStatus, read_run
from stepscope.store import STORE_NAME, StoreError, StoreReader
from stepscope.store.reader import Axis, send_command
from stepscope.store.recorder import CommandName

Answer = dict[str, Any]
FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}


def _json(content: Answer, status: int = 200) -> Response:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Response(text, status, {"Cache-Control": "no-store"}, "application/json")


class NotAllowed(Exception):
    """The run does not accept the command."""


_STATUS = {
    RunError: 404,
    StoreError: 422,
    NotAllowed: 403,
    ValueError: 400,
    RecursionError: 400,
    ClientDisconnect: 400,
}
"""HTTP status of each expected error."""


def _refuse(_request: Request, error: Exception) -> Response:
    status = next(code for kind, code in _STATUS.items() if isinstance(error, kind))
    return _json({"error": str(error)}, status)


def get_series(request: Request) -> Response:
    """`/api/series?run=&since=&events=&…`: state of a run, new rows and new events.

    `include_folded=1` adds the metrics of folded charts. Without a run: only the page's token.
    """
    server = services.get()
    query = request.query_params
    if "run" in query:
        return _json(_series(server, query))
    return _json({"page_token": _page_token(server, None)})


def _series(server: services.Services, query: Mapping[str, str]) -> Answer:
    folder = server.folder(query["run"])
    cursors = series.parse_cursors(query.get("since", ""))
    after = query.get("events", "0")
    if not after.isdecimal() or len(after) > 15:
        raise ValueError(f"events: must be an event id, got {after[:40]!r}.")
    run = read_run(folder)
    token: Answer = {"page_token": _page_token(server, run)}
    source = server.source_of(run)
    if source is not None:
        source.want(run.id)  # it may be an old run, or one that the size limit would delete
        token["source"] = source_state(source, run)
    if not (folder / STORE_NAME).exists():
        return state(run) | token
    include_folded = bool(query.get("include_folded"))
    try:
        with StoreReader(folder) as reader:
            answer = series.update(reader, run, cursors, int(after), include_folded)
    except StoreError:
        if run.status is not RunStatus.PENDING:
            raise
        return state(run) | token  # the store is being created
    found = server.findings.of(run)
    if found is not None:
        answer["verdict"] = found.line
    return answer | token


def _page_token(server: services.Services, run: RunInfo | None) -> str:
    busy = server.busy_reason(services.ServerActivity.RUN)
    return page_token(server.run_list.recent(), run, busy)


def get_window(request: Request) -> Response:
    """`/api/window?run=&axis=step|time&from=&to=&…`: rows of `get_series` in a zoomed range."""
    query = request.query_params
    folder = services.get().folder(query.get("run", ""))
    axis: Axis = "time" if query.get("axis") == "time" else "step"
    low = _finite("from", query.get("from", ""))
    high = _finite("to", query.get("to", ""))
    run = read_run(folder)
    with StoreReader(folder) as reader:
        include_folded = bool(query.get("include_folded"))
        found = series.window(reader, run, axis, low, high, include_folded)
    return _json({"run": run.id, "series": found})


async def post_command(request: Request) -> Response:
    """`/api/command`: JSON of run, name, args and id; the run's event carries the id."""
    return _json(await run_in_threadpool(send, await request.body()))


def get_plotly(_request: Request) -> Response:
    """`/vendor/plotly-….min.js`: plotly.js of the components."""
    return Response(
        live_chart.PLOTLY.read_bytes(),
        headers=FOREVER | {"Content-Encoding": "gzip"},
        media_type="text/javascript",
    )


def get_live_module(request: Request) -> Response:
    """`/vendor/live/VERSION/NAME.js`: a module of the live chart component."""
    source = live_chart.MODULES.get(request.path_params["name"])
    if source is None or request.path_params["version"] != live_chart.VERSION:
        return Response("No such module; reload the page.", 404, media_type="text/plain")
    return Response(source, headers=FOREVER, media_type="text/javascript")


def _finite(name: str, text: str) -> float:
    value = float(text) if len(text) < 40 else math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name}: must be a finite number, got {text[:40]!r}.")
    return value


API = Starlette(
    routes=[
        Route("/series", get_series),
        Route("/window", get_window),
        Route("/command", post_command, methods=["POST"]),
    ],
    exception_handlers=dict.fromkeys(_STATUS, _refuse),
)
ROUTES = [
    Mount("/api", API),
    Route(live_chart.PLOTLY_URL, get_plotly),
    Route(live_chart.MODULES_PATH, get_live_module),
]


_FACTS = (
    *("kind", "device", "devices", "optimizers", "custom", "commands", "capabilities"),
    *("total_steps", "world_size"),
)


def page_token(listing: Listing, run: RunInfo | None, busy: str | None = None) -> str:
    """Return the token of a page that shows `run`; `busy` is why no run can start, or None."""
    built_from: list[object] = [listing.version, busy]
    if run is not None:
        built_from += [
            *(run.id, run.status.value, can_end_now(run)),
            [run.run_json.get(name) for name in _FACTS],
            snapshots(run.folder),
            profiles(run.folder),
            sorted(used_gpus(run)),
        ]
        if "mirror" in run.run_json:  # its connection may be lost, its store received later
            refused = read_only_reason(run) if run.status.live else None
            built_from += [refused, (run.folder / STORE_NAME).exists()]
    return f"{zlib.crc32(repr(built_from).encode()):x}"


class _Arguments(msgspec.Struct):
    """Arguments of a command: the text of Mark, the steps of Profile and Memory snapshot."""

    text: Annotated[str, msgspec.Meta(max_length=200)] = ""
    steps: Annotated[int, msgspec.Meta(ge=1, le=STEPS_LIMIT)] = 1


class _Request(msgspec.Struct):
    """The body of a request: an id above 2**53 would be inexact in JavaScript."""

    run: str
    name: str
    id: Annotated[int, msgspec.Meta(gt=0, lt=2**53)]
    args: _Arguments = msgspec.field(default_factory=_Arguments)


def send(body: bytes) -> dict[str, Any]:
    """Send the command in `body`; `said` is the outcome of a command without an event.

    Raises NotAllowed, ValueError, RunError and StoreError.
    """
    request = msgspec.json.decode(body, type=_Request)
    run = read_run(services.get().folder(request.run))
    if request.name == END_NOW:
        if not can_end_now(run):
            raise NotAllowed("Force stop is only for a run on this host that does not stop.")
        return {"said": services.get().end_job(run)}
    name = CommandName(request.name)
    reason = refusal(name, run)
    if reason is not None:
        raise NotAllowed(f"{name.replace('_', ' ').capitalize()} was not sent: {reason}")
    args: dict[str, Any] = {}
    if name is CommandName.MARK:
        args["text"] = request.args.text.strip() or "marked"
    elif name in (CommandName.PROFILE, CommandName.MEMORY_SNAPSHOT):
        args["steps"] = request.args.steps
    send_command(run.folder, name, args, request.id)
    return {"said": None}
