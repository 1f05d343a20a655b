"""The store of one run: a SQLite file written by one thread and read by anyone.

Reading order: `blocks`, `schema`, `writer`, `reader`. `docs/storage.md` describes the file.
"""

from stepscope.store.blocks import Block
from stepscope.store.reader import EventRow, RunReader, SeriesInfo
from stepscope.store.schema import STORE_NAME, StoreError, store_name
from stepscope.store.writer import RunWriter

__all__ = [
    "STORE_NAME",
    "Block",
    "EventRow",
    "RunReader",
    "RunWriter",
    "SeriesInfo",
    "StoreError",
    "store_name",
]
