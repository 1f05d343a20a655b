"""The store of one run: a SQLite file written by one thread and read by anyone.

Reading order: `blocks`, `schema`, `writer`, `reader`. `docs/storage.md` describes the file.
"""

from stepscope.store.blocks import SeriesBlock
from stepscope.store.reader import EventRow, SeriesInfo, StoreReader
from stepscope.store.schema import STORE_NAME, StoreError, store_name
from stepscope.store.writer import StoreWriter

__all__ = [
    "STORE_NAME",
    "SeriesBlock",
    "EventRow",
    "StoreReader",
    "StoreWriter",
    "SeriesInfo",
    "StoreError",
    "store_name",
]
