"""How a run trains, as its run.json describes it, and what can be recommended. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepscope.common.json_values import dict_of
from stepscope.gpu.source import is_simulated
from stepscope.run import RunKind

BF16_FROM = (8, 0)  # Compute capability of Ampere, the first with bf16 tensor cores.
FP16_FROM = (7, 0)  # Compute capability of Volta, the first with tensor cores.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """Properties of a run on which recommendations depend.

    `own`: `config` is a RunConfig; a script has `applied`, the names of its settings in effect.
    `capability` is the GPU's compute capability, None if unknown. `step_time` is in seconds.
    `in_memory`: the data set is in memory, where worker processes only slow loading.
    """

    on_gpu: bool
    own: bool
    config: Mapping[str, Any] = field(default_factory=dict)
    cores: int = 1
    capability: tuple[int, int] | None = None
    simulated: bool = False
    step_time: float = 0.0
    in_memory: bool = False
    world_size: int = 1
    applied: frozenset[str] = frozenset()

    @property
    def threads(self) -> int:
        """Number of CPU threads of one operation; a setting of 0 is half of the cores."""
        return self.number("num_threads") or max(1, self.cores // 2)

    def is_on(self, name: str) -> bool:
        """Return True if a switch of RunConfig is on."""
        return self.own and self.config.get(name) is True

    def number(self, name: str) -> int:
        """Return an integer setting of RunConfig, or 0."""
        value = self.config.get(name) if self.own else None
        return value if type(value) is int else 0

    def text(self, name: str, default: str) -> str:
        """Return a text setting of RunConfig, or `default`."""
        value = self.config.get(name) if self.own else None
        return value if isinstance(value, str) else default

    @property
    def copies_block(self) -> bool:
        """True if copies to the GPU block the built-in loop, within its data wait."""
        return self.own and not (self.is_on("non_blocking") and self.is_on("pin_memory"))


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommendation as a sentence, with code or a setting (`name`, `value`) if it has one."""

    text: str
    code: str | None = None
    name: str | None = None
    value: Any = None


def setup_of(run_json: Mapping[str, Any], step_time: float = 0.0) -> RunSetup:
    """Return the properties of a run for recommendations, from an untrusted run.json."""
    environment, config = (dict_of(run_json.get(name)) for name in ("environment", "config"))
    capability, cores = run_json.get("compute_capability"), environment.get("cores")
    gpu, settings = training_gpu(run_json), run_json.get("settings") or ()
    known = isinstance(capability, list) and [type(part) for part in capability] == [int, int]
    return RunSetup(
        on_gpu=gpu is not None,
        own=run_json.get("kind", RunKind.TRAINER) == RunKind.TRAINER,
        config=config,
        cores=cores if type(cores) is int and cores > 0 else 1,
        capability=(capability[0], capability[1]) if capability and known else None,
        simulated=gpu is not None and is_simulated(gpu),
        step_time=step_time,
        in_memory=run_json.get("data_in_memory") is True,
        world_size=run_json.get("world_size") or 1,
        applied=frozenset(
            str(one.get("name")) for one in settings if one.get("state") == "in effect"
        ),
    )


def training_gpu(run_json: Mapping[str, Any]) -> str | None:
    """Return the UUID of the GPU that the run trains on; None for a CPU or if unknown."""
    device = run_json.get("device")
    if device is None and run_json.get("kind", RunKind.TRAINER) == RunKind.TRAINER:
        device = dict_of(run_json.get("config")).get("device")
    return device if isinstance(device, str) and device != "cpu" else None


def setting_text(name: str, value: Any) -> str:
    """Return the text of a setting.

    >>> setting_text("num_workers", 4), setting_text("pin_memory", True)
    ('num_workers 4', 'pin_memory on')
    """
    shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return f"{name} {shown}"


def half_precision(setup: RunSetup) -> str | None:
    """Return the 16-bit precision of the GPU for a run in fp32; None without or if unknown."""
    if setup.capability is None or setup.text("precision", "fp32") not in ("fp32", "tf32"):
        return None
    if setup.capability >= BF16_FROM:
        return "bf16"
    return "fp16" if setup.capability >= FP16_FROM else None
