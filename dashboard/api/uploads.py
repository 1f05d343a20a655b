"""`POST /api/snapshot?name=`: a snapshot file of the reader's, written as it comes.

Streamlit's own upload would hold the whole file in this process's memory.
"""

from __future__ import annotations

import asyncio
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from dashboard import services
from dashboard.api.origin import check_sender
from dashboard.snapshot_files import too_large

CHUNK = 4 * 2**20
"""Bytes gathered before they are written."""
STALL_S, UPLOAD_S = 60.0, 900.0
"""Longest pause and longest time of an upload: no other can begin meanwhile."""
TYPE = "application/octet-stream"


async def receive(request: Request) -> dict[str, str]:
    """Write the body into the folder of snapshots; return the file's name there.

    Raises NotAllowed, ValueError, OSError and ClientDisconnect.
    """
    check_sender(request, TYPE)
    kept = await run_in_threadpool(services.get().snapshots.kept_bytes)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20:
        _refuse(int(length), kept)
    with services.get().snapshots.receiving(request.query_params.get("name", "")) as upload:
        await _write(request, upload.file, kept)
    return {"name": upload.name}


async def _write(request: Request, file: BinaryIO, kept: int) -> None:
    size, gathered = 0, bytearray()
    clock = asyncio.get_running_loop().time
    end = clock() + UPLOAD_S
    try:
        async with asyncio.timeout(STALL_S) as limit:
            async for chunk in request.stream():
                limit.reschedule(min(clock() + STALL_S, end))
                size += len(chunk)
                _refuse(size, kept)
                gathered += chunk
                if len(gathered) >= CHUNK:
                    await run_in_threadpool(file.write, gathered)
                    gathered = bytearray()
    except TimeoutError:
        raise ValueError(
            f"The upload stood still for {STALL_S:.0f} s, or took more than {UPLOAD_S:.0f} s. "
            "Send it again, or copy the file into the folder of snapshots."
        ) from None
    await run_in_threadpool(file.write, gathered)
    if size == 0:
        raise ValueError("The file must not be empty.")


def _refuse(size: int, kept: int) -> None:
    refused = too_large(size, kept)
    if refused is not None:
        raise ValueError(refused)
