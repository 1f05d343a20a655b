"""What is known of each workload without building it."""

from __future__ import annotations

from trainer.config import FIELDS, Workload
from trainer.workload_traits import SOME_HAVE, TRAITS, reads


def test_each_workload_has_traits_of_known_fields() -> None:
    assert set(TRAITS) == set(Workload)
    assert set(FIELDS) >= SOME_HAVE


def test_a_size_has_a_meaning_only_where_it_is_read() -> None:
    assert reads(Workload.MEMORY_STRESS, "width")
    assert not reads(Workload.DIGITS_CNN, "width")
    assert reads(Workload.DIGITS_CNN, "batch_size")
