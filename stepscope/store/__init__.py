"""The store of one run: a SQLite file; see docs/storage.md."""

from stepscope.store.blocks import SeriesBlock as SeriesBlock
from stepscope.store.reader import EventRow as EventRow
from stepscope.store.reader import SeriesInfo as SeriesInfo
from stepscope.store.reader import StoreReader as StoreReader
from stepscope.store.schema import STORE_NAME as STORE_NAME
from stepscope.store.schema import StoreError as StoreError
from stepscope.store.schema import store_name as store_name
from stepscope.store.writer import StoreWriter as StoreWriter
