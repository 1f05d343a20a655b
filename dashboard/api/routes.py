"""HTTP routes of the dashboard, answered from the run folder without a Streamlit session.

All routes but `/api/command` only read. Handlers are plain functions, so that Starlette runs them
in worker threads: SQLite must not block the event loop of all sessions.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dashboard import live_chart, services
from dashboard.api import commands
from dashboard.api.origin import NotAllowed, check_sender
from dashboard.api.page_token import page_token
from dashboard.charts import series
from dashboard.charts.rank_events import read_rank_events, unseen
from dashboard.charts.run_state import state
from dashboard.controls.config_widgets import is_possible
from dashboard.controls.sidebar_groups import PLACES
from dashboard.out_of_memory import as_verdict
from dashboard.run_analyzer import RunAnalyzer
from dashboard.sources import source_state
from dashboard.verdicts import as_json, diagnose, rank_verdict
from stepscope.diagnosis.classify import BottleneckDiagnosis
from stepscope.run import RunError, RunInfo, RunStatus, read_run
from stepscope.store import STORE_NAME, StoreError, StoreReader
from stepscope.store.reader import Axis
from trainer.config_validation import TrainDevice

Answer = dict[str, Any]
T = TypeVar("T")
DIAGNOSIS_S = 5.0  # between two diagnoses of a run: 2 ms of a training thread's time
FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}


def _json(content: Answer, status: int = 200) -> Response:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Response(text, status, {"Cache-Control": "no-store"}, "application/json")


_STATUS = {RunError: 404, StoreError: 422, NotAllowed: 403, ValueError: 400}
"""HTTP status of each expected error."""


def _refused(error: Exception) -> Response:
    status = next(code for kind, code in _STATUS.items() if isinstance(error, kind))
    return _json({"error": str(error)}, status)


def _answering(handler: Callable[[T], Answer]) -> Callable[[T], Response]:
    @functools.wraps(handler)
    def respond(asked: T) -> Response:
        try:
            return _json(handler(asked))
        except tuple(_STATUS) as error:
            return _refused(error)

    return respond


_RANK_EVENTS = RunAnalyzer(read_rank_events, "the events of the ranks cannot be read")


@_answering
def get_series(request: Request) -> Answer:
    """`/api/series?run=&since=&events=&…`: state of a run, new rows and new events.

    `include_folded=1` adds the metrics of folded charts.
    """
    query = request.query_params
    server = services.get()
    folder = server.folder(query.get("run", ""))
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
            found = _RANK_EVENTS.of(run)
            unread = unseen(found or [], query.get("rank_events", ""))
            answer["rank_events"] = unread[0]
            answer["rank_events_seen"] = "" if found is None else unread[1]
            return answer | token | {"verdict": _verdict(server, run)}
    except StoreError:
        if run.status is not RunStatus.PENDING:
            raise
        return state(run) | token  # the store is being created


def _verdict(server: services.Services, run: RunInfo) -> Answer | None:
    """Return why the run ended, hangs or waits; None without a finding."""
    hang = server.hangs.of(run) if run.status.live else None
    return (
        as_verdict(run, _known_devices(server))
        or rank_verdict(hang, None)
        or as_json(_DIAGNOSES.of(run), PLACES)
    )


def _known_devices(server: services.Services) -> list[TrainDevice]:
    return server.devices().devices if server.devices_known else []


def _diagnose(run: RunInfo) -> BottleneckDiagnosis | None:
    server = services.get()
    config = run.run_json.get("config") or {}
    allowed = functools.partial(is_possible, config=config, devices=_known_devices(server))
    return diagnose(run, server.stragglers.of(run), allowed)


_DIAGNOSES = RunAnalyzer(
    _diagnose, "the run cannot be diagnosed", every_s=DIAGNOSIS_S, jobs_only=False
)


@_answering
def get_runs(_request: Request) -> Answer:
    """`/api/runs`: the page token of a page without a run."""
    server = services.get()
    return {"page_token": _page_token(server, None)}


def _page_token(server: services.Services, run: RunInfo | None) -> str:
    busy = server.busy_reason(services.ServerActivity.RUN)
    return page_token(server.run_list.recent(), run, busy)


@_answering
def get_window(request: Request) -> Answer:
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
    return {"run": run.id, "series": found}


async def post_command(request: Request) -> Response:
    """`/api/command`: JSON of run, name, args and id; the run's event carries the id."""
    try:
        check_sender(request)
        body = await commands.read_body(request)
    except (NotAllowed, ValueError) as error:
        return _refused(error)
    except ClientDisconnect:
        return _refused(ValueError("The client disconnected."))
    return await run_in_threadpool(_answering(commands.send), body)


def no_such_route(request: Request) -> Response:
    """Answer any other path under `/api/`, for which Streamlit would return its page."""
    return _json({"error": f"{request.url.path[:100]}: unknown route."}, 404)


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


ROUTES = [
    Route("/api/series", get_series),
    Route("/api/window", get_window),
    Route("/api/runs", get_runs),
    Route("/api/command", post_command, methods=["POST"]),
    Route("/api/{path:path}", no_such_route, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
    Route(live_chart.PLOTLY_URL, get_plotly),
    Route(live_chart.MODULES_PATH, get_live_module),
]
