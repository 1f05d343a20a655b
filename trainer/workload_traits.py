"""Properties of each workload that are known before it is built. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadTraits:
    """Properties of a workload; `fields` are RunConfig fields that most others do not read."""

    fields: tuple[str, ...] = ()
    convolutions: bool = False  # channels_last and cuDNN settings have an effect
    decodes: bool = False  # samples are read from files on demand
    seeded_data: bool = False  # the data depend on the seed


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
    # Its model and data are unknown before its file runs: nothing is ruled out.
    Workload.CUSTOM: WorkloadTraits(fields=("custom_options",), convolutions=True),
}

SOME_HAVE = frozenset(field for traits in TRAITS.values() for field in traits.fields)


def reads(workload: Workload, field: str) -> bool:
    """Return True if this workload reads this field of RunConfig."""
    return field not in SOME_HAVE or field in TRAITS[workload].fields
