"""`POST /api/command`: writes a command from the browser into the run folder."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
from starlette.requests import Request

from dashboard import services
from dashboard.api.origin import NotAllowed
from dashboard.controls.actions import END_NOW, can_end_now, refusal
from stepscope.memory.snapshots import recording
from stepscope.profiling import profile_command
from stepscope.run import read_run
from stepscope.store.reader import send_command
from stepscope.store.recorder import CommandName

MAX_BYTES = 4000
MAX_MARK_CHARS = 200
STEPS_LIMITS = {
    CommandName.PROFILE: profile_command.STEPS_LIMIT,
    CommandName.MEMORY_SNAPSHOT: recording.STEPS_LIMIT,
}


class _Asked(msgspec.Struct):
    """The body of a request: an id above 2**53 would be inexact in JavaScript."""

    run: str
    name: str
    id: Annotated[int, msgspec.Meta(gt=0, lt=2**53)]
    args: dict[str, Any] | None = None


async def read_body(request: Request) -> bytes:
    """Return the body. Raises ValueError if it is too long, ClientDisconnect."""
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdecimal() else 0
    body = bytearray()
    stream = request.stream()
    while size <= MAX_BYTES and (chunk := await anext(stream, b"")):
        body += chunk
        size = len(body)
    if size > MAX_BYTES:
        raise ValueError(f"The request must have at most {MAX_BYTES} bytes.")
    return bytes(body)


def send(body: bytes) -> dict[str, Any]:
    """Send the command in `body`; `said` is the outcome of a command without an event.

    Raises NotAllowed, ValueError, RunError and StoreError.
    """
    asked = _parse(body)
    run = read_run(services.get().folder(asked.run))
    if asked.name == END_NOW:
        if not can_end_now(run):
            raise NotAllowed("Force stop is only for a run on this host that does not stop.")
        return {"said": services.get().end_job(run)}
    name = CommandName(asked.name)
    args = _arguments(name, asked.args or {})
    reason = refusal(name, run)
    if reason is not None:
        raise NotAllowed(f"{name.replace('_', ' ').capitalize()} was not sent: {reason}")
    send_command(run.folder, name, args, asked.id)
    return {"said": None}


def _parse(body: bytes) -> _Asked:
    try:
        asked = msgspec.convert(json.loads(body), _Asked)
    except RecursionError:
        raise ValueError("The request must nest fewer objects.") from None
    if asked.name not in (*CommandName, END_NOW):
        raise ValueError(f"name: must be a command, got {asked.name[:40]!r}.")
    return asked


def _arguments(name: CommandName, args: dict[str, Any]) -> dict[str, Any]:
    if name in STEPS_LIMITS:
        steps = args.get("steps")
        limit = STEPS_LIMITS[name]
        if type(steps) is not int or not 1 <= steps <= limit:
            raise ValueError(f"args: steps must be a whole number from 1 to {limit}.")
        return {"steps": steps}
    if name is not CommandName.MARK:
        if args:
            raise ValueError(f"args: must be empty for {name}.")
        return {}
    text = args.get("text")
    if not isinstance(text, str) or len(text) > MAX_MARK_CHARS:
        raise ValueError(f"args: text must be at most {MAX_MARK_CHARS} characters.")
    return {"text": text.strip() or "marked"}
