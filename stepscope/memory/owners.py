"""The optimizers and models of this process, found among the objects of Python's garbage collector.

A script that calls `stepscope.init` hands over neither, and the hooks of `stepscope watch` see no
frozen weights. Nothing of torch is patched for it: a search looks at the type of every tracked
object, at about 0.2 us each.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any

from stepscope.memory.tensors import members


def search() -> tuple[list[Any], list[Any]]:
    """Return the optimizers, and the models that no other module holds; for the training thread.

    What another thread would hold meanwhile could not be freed by the training. After gc.freeze()
    older objects are not found.
    """
    optimizer_kinds = _with_subclasses("torch.optim.optimizer", "Optimizer")
    module_kinds = _with_subclasses("torch.nn.modules.module", "Module")
    kinds = optimizer_kinds | module_kinds
    if not kinds:
        return [], []
    found = _instances(kinds)
    optimizers = [one for one in found if type(one) in optimizer_kinds and _is_made(one)]
    return optimizers, outermost(one for one in found if type(one) in module_kinds)


def outermost(modules: Iterable[Any]) -> list[Any]:
    """Return the modules that are not in another one."""
    modules = list(modules)
    inner = {
        id(child)
        for module in modules
        for child in members(module, "_modules")
        if child is not module
    }
    return [module for module in modules if id(module) not in inner]


def _instances(kinds: set[type[Any]]) -> list[Any]:
    """Return the tracked objects of exactly these classes.

    `gc.get_objects()` also returns tuples that other threads are still building from generators.
    A thread that comes to extend one while it is referenced here raises SystemError (CPython's
    bpo-15108), so no bytecode may run while they are: the types are collected by one call in C,
    and `gc.get_referrers` returns only what refers to a class, as each instance does.
    """
    types = set(map(type, chain.from_iterable(map(gc.get_objects, [None]))))
    return [one for one in gc.get_referrers(*(kinds & types)) if type(one) in kinds]


def _is_made(optimizer: Any) -> bool:
    """Say whether its constructor has run."""
    own = vars(optimizer)
    return "param_groups" in own and "state" in own


def _with_subclasses(module: str, name: str) -> set[type[Any]]:
    """Return a class of torch and all that derive from it; nothing before it is imported."""
    base = getattr(sys.modules.get(module), name, None)
    if base is None:
        return set()
    kinds, left = {base}, [base]
    while left:
        fresh = set(type.__subclasses__(left.pop())) - kinds
        kinds |= fresh
        left += fresh
    return kinds
