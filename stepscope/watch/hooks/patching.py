"""Wrap functions of torch, once the script has imported torch.

A wrapper never raises, and does not affect torch.compile. Where the compiler traces the original,
`is_compiling()` removes the wrapper; between two graphs `opaque` prevents its compilation.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

Function = Callable[..., Any]


def replace(owner: Any, name: str, make: Callable[[Function], Function], *, traced: bool) -> None:
    """Replace `owner.name` by `make(original)`.

    `traced`: torch.compile can trace the original into a graph, and the wrapper calls
    `is_compiling()`. Otherwise the wrapper runs between two graphs, like the original.
    """
    original = getattr(owner, name)
    wrapper = functools.wraps(original)(opaque(make(original)))
    if not traced:
        wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def replace_call(owner: Any, name: str, instead: Function) -> None:
    """Call `instead` with the original before the arguments in place of `owner.name`.

    One more frame per call than `replace`; never traced.
    """

    def make(original: Function) -> Function:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return instead(original, *args, **kwargs)

        return wrapper

    opaque(instead)
    replace(owner, name, make, traced=False)


def replace_bound(
    owner: type, name: str, make: Callable[[Function], Callable[[Any], Function | None]]
) -> None:
    """Replace `instance.name` by `make(original)(instance)`, unless that returns None.

    `owner.name` remains the original, which scripts use as a key and compare by identity.
    """
    former = vars(owner).get(name)
    original = former if isinstance(former, _Bound) else getattr(owner, name)
    setattr(owner, name, _Bound(original, make(original)))


class _Bound:
    """A method whose calls through an instance can be wrapped; the class returns the original."""

    __slots__ = ("_bind", "_original")

    def __init__(self, original: Any, bind: Callable[[Any], Function | None]) -> None:
        self._original = original
        self._bind = bind
        opaque(_Bound.__get__, with_callees=True)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bound = None if instance is None else self._bind(instance)
        if bound is not None:
            return bound
        return self._original.__get__(instance, owner)

    def __call__(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the method, as the original of another wrapper."""
        return self.__get__(instance)(*args, **kwargs)


class HookGuard:
    """Logs the first failure of a hook, and disables the hook."""

    __slots__ = ("metrics", "works")

    def __init__(self, metrics: str) -> None:
        self.metrics = metrics  # The metrics that are missing after a failure.
        self.works = True

    def call(self, function: Function, *args: Any) -> Any:
        """Return the function's result; None if it fails or the hook is disabled."""
        if self.works:
            try:
                return function(*args)
            except Exception as error:  # noqa: BLE001 - a metric must not end a training
                self.works = False
                text = "stepscope: %s will be missing from here on (%s: %s)"
                log.warning(text, self.metrics, type(error).__name__, error)
        return None


def opaque(function: Function, *, with_callees: bool = False) -> Function:
    """Prevent torch.compile from compiling the function, and on request its callees."""
    function = getattr(function, "__func__", function)
    torch = sys.modules.get("torch")
    if torch is not None:
        try:
            # Like torch._dynamo.disable, without the import of torch._dynamo, which takes 1 s.
            frames = torch._C._dynamo.eval_frame
            if hasattr(frames, "skip_code"):  # the older torch, which cannot exclude callees
                frames.skip_code(function.__code__)
                return function
            action, strategy = frames._FrameAction, frames._FrameExecStrategy
            callees = action.SKIP if with_callees else action.DEFAULT
            frames.set_code_exec_strategy(function.__code__, strategy(action.SKIP, callees))
        except (AttributeError, TypeError) as error:
            _log_unsupported(torch.__version__, str(error))
    return function


@functools.cache
def _log_unsupported(version: str, error: str) -> None:
    log.warning(
        "stepscope: torch %s cannot keep its compiler off our code (%s): under "
        "torch.compile steps may be slower",
        version,
        error,
    )


class PostImportHook(MetaPathFinder):
    """Calls `then` after the import of the module `name`; first in `sys.meta_path` until then.

    The other finders find the module. Only `exec_module` of its loader instance is wrapped, so that
    `module.__loader__`, `inspect` and `importlib.resources` do not change.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def start(self) -> None:
        """Wait for the import; call the function immediately if the module is imported."""
        module = sys.modules.get(self._name)
        if module is not None:
            self._then(module)
        else:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the other finders, with a wrapped loader."""
        if fullname != self._name:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self._name:
                self.stop()
                self._then(module)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            text = "stepscope: the loader of %s is not supported: no training metrics are recorded"
            log.warning(text, self._name)
