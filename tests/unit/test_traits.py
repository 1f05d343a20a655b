"""What is known of each workload without building it."""

from __future__ import annotations

from trainer.config import FIELDS, Workload
from trainer.workload_traits import SOME_HAVE, TRAITS


def test_each_workload_has_traits_of_known_fields() -> None:
    assert set(TRAITS) == set(Workload)
    assert set(FIELDS) >= SOME_HAVE
