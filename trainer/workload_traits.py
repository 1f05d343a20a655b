"""What is known of each workload without building it, for the page and for `problems`.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadTraits:
    """What a workload has that others have not."""

    fields: tuple[str, ...] = ()
    """Fields of RunConfig that this workload reads and most others do not."""
    convolutions: bool = False  # channels_last and the settings of cuDNN can make a difference.
    decodes: bool = False
    """Each sample is read from a file when it is needed: the data set does not lie in memory."""
    seeded_data: bool = False  # The data are made from the seed: another one gives another task.


TRAITS: dict[Workload, WorkloadTraits] = {
    Workload.LINEAR: WorkloadTraits(seeded_data=True),
    Workload.DIGITS_MLP: WorkloadTraits(),
    Workload.DIGITS_CNN: WorkloadTraits(convolutions=True),
    Workload.IMAGES: WorkloadTraits(
        fields=("dataset", "image_size", "horizontal_flip", "skip_unreadable"),
        convolutions=True,
        decodes=True,
    ),
    Workload.GPT: WorkloadTraits(
        fields=("num_layers", "width", "context_length", "dropout", "tie_embeddings")
    ),
    Workload.RESNET: WorkloadTraits(
        fields=("width", "image_size", "num_classes"), convolutions=True, seeded_data=True
    ),
    Workload.MATMUL: WorkloadTraits(fields=("width",), seeded_data=True),
    Workload.MEMORY_STRESS: WorkloadTraits(
        fields=("width", "image_size"), convolutions=True, seeded_data=True
    ),
    # What its model and data are is known only once its file has run: nothing is ruled out.
    Workload.CUSTOM: WorkloadTraits(fields=("custom_options",), convolutions=True),
}

SOME_HAVE = frozenset(field for traits in TRAITS.values() for field in traits.fields)
"""Fields that only some workloads read."""


def reads(workload: Workload, field: str) -> bool:
    """Return True if this field of RunConfig has a meaning for this workload."""
    return field not in SOME_HAVE or field in TRAITS[workload].fields
