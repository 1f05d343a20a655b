"""`POST /api/command`: writes a command from the browser into the run folder."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from dashboard import services
from dashboard.controls.actions import END_NOW, can_end_now, refusal
from stepscope.profiling.profile_command import STEPS_LIMIT
from stepscope.run import read_run
from stepscope.store.reader import send_command
from stepscope.store.recorder import CommandName


class NotAllowed(Exception):
    """The run does not accept the command."""


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
