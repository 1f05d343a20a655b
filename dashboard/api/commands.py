"""`POST /api/command`: writes a command from the browser into the run folder."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from starlette.requests import Request

from dashboard import services
from dashboard.api.origin import NotAllowed
from dashboard.controls.actions import END_NOW, can_end_now, refusal
from stepscope.memory.snapshots import recording
from stepscope.profiling import profile_command
from stepscope.recorder.recorder import CommandName
from stepscope.run import read_run
from stepscope.session.stop import SIGNALS, kill_unheard
from stepscope.store.reader import send_command

MAX_BYTES = 4000
BODY_TIMEOUT_S = 10.0
MAX_MARK_CHARS = 200
STEPS_LIMITS = {
    CommandName.PROFILE: profile_command.STEPS_LIMIT,
    CommandName.MEMORY_SNAPSHOT: recording.STEPS_LIMIT,
}
_MAX_ID = 2**53  # larger integers are inexact in JavaScript

_stops: Counter[str] = Counter()  # Stop commands by run on this server


async def read_body(request: Request) -> bytes:
    """Return the body. Raises ValueError if it is too long or too slow, ClientDisconnect."""
    length = request.headers.get("content-length", "")
    _check_size(int(length) if length.isdecimal() and len(length) < 20 else 0)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                _check_size(len(body))
    except TimeoutError:
        raise ValueError(
            f"The request must arrive within {BODY_TIMEOUT_S:.0f} s. Press again."
        ) from None
    return bytes(body)


def send(body: bytes) -> dict[str, Any]:
    """Send the command in `body`; `said` is the outcome of a command without an event.

    The state of the run is checked again here. Raises NotAllowed, ValueError, RunError and
    StoreError.
    """
    run_id, asked, args, command_id = _parse(body)
    if asked == END_NOW:
        return {"said": _end_now(run_id)}
    name = CommandName(asked)
    run = read_run(services.get().folder(run_id))
    reason = refusal(name, run)
    if reason is not None:
        raise NotAllowed(f"{name.replace('_', ' ').capitalize()} was not sent: {reason}")
    said = None
    if name is CommandName.STOP:
        _stops[run.id] += 1
        said = kill_unheard(run) if _stops[run.id] >= len(SIGNALS) else None
    if said is None:
        send_command(run.folder, name, args, command_id)
    return {"said": said}


def _end_now(run_id: str) -> str:
    run = read_run(services.get().folder(run_id))
    if not can_end_now(run):
        raise NotAllowed("Force stop is only for a job on this host that does not stop.")
    return services.get().end_job(run)


def _parse(body: bytes) -> tuple[str, str, dict[str, Any], int]:
    try:
        asked = json.loads(body)
    except RecursionError:
        raise ValueError("The request must nest fewer objects.") from None
    if not isinstance(asked, dict):
        raise ValueError("The request must be a JSON object.")
    run_id, name, args, command_id = map(asked.get, ("run", "name", "args", "id"))
    if not isinstance(run_id, str):
        raise ValueError("run: must be the name of a run folder.")
    if name not in (*CommandName, END_NOW):
        raise ValueError(f"name: must be a command, got {str(name)[:40]!r}.")
    if type(command_id) is not int or not 0 < command_id < _MAX_ID:
        raise ValueError(
            f"id: must be a whole number from 1 to 2^53, got {str(command_id)[:40]!r}."
        )
    given = {} if name == END_NOW else _arguments(CommandName(str(name)), args)
    return run_id, str(name), given, command_id


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise ValueError(f"The request must have at most {MAX_BYTES} bytes, got {size}.")


def _arguments(name: CommandName, args: object) -> dict[str, Any]:
    if name in STEPS_LIMITS:
        steps, limit = args.get("steps") if isinstance(args, dict) else None, STEPS_LIMITS[name]
        if type(steps) is not int or not 1 <= steps <= limit:
            raise ValueError(f"args: steps must be a whole number from 1 to {limit}.")
        return {"steps": steps}
    if name is not CommandName.MARK:
        if args:
            raise ValueError(f"args: must be empty for {name}.")
        return {}
    text = args.get("text") if isinstance(args, dict) else None
    if not isinstance(text, str) or len(text) > MAX_MARK_CHARS:
        raise ValueError(f"args: text must be at most {MAX_MARK_CHARS} characters.")
    return {"text": text.strip() or "marked"}
