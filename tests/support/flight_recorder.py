"""Dumps of PyTorch's flight recorder, made up."""

from __future__ import annotations

from typing import Any


def entry(record: int, name: str = "gloo:all_reduce", **fields: Any) -> dict[str, Any]:
    return {
        "record_id": record,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": record + 1,
        "profiling_name": name,
        "time_created_ns": 1_795_350_317_825_382_756 + record * 1_000_000,
        "input_sizes": [[64]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": True,
        "is_p2p": False,
    } | fields


def content(*entries: dict[str, Any]) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": config, "entries": list(entries)}
