"""`POST /api/snapshot?name=`: a snapshot file of the reader's, written as it comes.

Streamlit's own upload would hold the whole file in this process's memory.
"""

from __future__ import annotations

import asyncio
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from dashboard import services
from dashboard.api.commands import NotAllowed
from dashboard.snapshot_files import too_large

CHUNK = 4 * 2**20
"""Bytes gathered before they are written."""
STALL_S = 60.0
"""Longest pause of an upload: no other can begin meanwhile."""
TYPE = "application/octet-stream"


def check_upload(request: Request) -> None:
    """Raise NotAllowed unless the request comes from a page of this server.

    A foreign page cannot send this header of ours without asking this server first, which never
    allows it.
    """
    origin, headers = request.headers.get("origin"), request.headers
    if headers.get("content-type", "").partition(";")[0] != TYPE:
        raise NotAllowed(f"Content-Type: must be {TYPE}.")
    if "x-stepscope" not in headers:
        raise NotAllowed("X-Stepscope: the header is missing.")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        raise NotAllowed(f"Origin: must be this server's, got {origin[:100]!r}.")


async def receive(request: Request) -> dict[str, str]:
    """Write the body into the folder of snapshots; return the file's name there.

    Raises NotAllowed, ValueError, OSError and ClientDisconnect.
    """
    check_upload(request)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20:
        _refuse(int(length))
    with services.get().snapshots.receiving(request.query_params.get("name", "")) as upload:
        await _write(request, upload.file)
    return {"name": upload.name}


async def _write(request: Request, file: BinaryIO) -> None:
    size, gathered = 0, bytearray()
    try:
        async with asyncio.timeout(STALL_S) as limit:
            async for chunk in request.stream():
                limit.reschedule(asyncio.get_running_loop().time() + STALL_S)
                size += len(chunk)
                _refuse(size)
                gathered += chunk
                if len(gathered) >= CHUNK:
                    await run_in_threadpool(file.write, gathered)
                    gathered = bytearray()
    except TimeoutError:
        raise ValueError(f"The upload stood still for {STALL_S:.0f} s. Send it again.") from None
    await run_in_threadpool(file.write, gathered)
    if size == 0:
        raise ValueError("The file must not be empty.")


def _refuse(size: int) -> None:
    refused = too_large(size)
    if refused is not None:
        raise ValueError(refused)
