"""Settings of DataLoaders, applied to the arguments of their construction, and of copies."""

from __future__ import annotations

import io
import multiprocessing
import sys
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

from stepscope.settings.setting import Moment, Setting

FILE_MODULES = {"h5py", "sqlite3", "tarfile", "tempfile", "zipfile"}


class LoaderSetting(Setting):
    """An argument of DataLoader, which iterators have as an attribute with an underscore."""

    moment = Moment.LOADER
    needs_workers: ClassVar[bool] = True

    def __init__(self, text: str | None = None) -> None:
        super().__init__(text)
        self.loaders: list[weakref.ref[Any]] = []
        """The loaders whose construction was changed."""
        self._seen: list[Any] = []
        """The values in the iterators of changed loaders."""
        self._is_kept = True  # in the latest iterator that is not of an evaluation
        self._steps = [0, 0]  # without and with the value

    def problem(self, subject: dict[str, Any]) -> str | None:
        if self.needs_workers and not subject["num_workers"]:
            return f"{self.name} needs num_workers above 0."
        if subject[self.name] == self.value:
            return f"The DataLoader already has {self.name}={self.value}."
        return None

    def enter(self, subject: dict[str, Any]) -> None:
        subject[self.name] = self.value

    def iterating(self, loader: Any, iterator: Any) -> None:
        """Read the value back from a new iterator."""
        value = self.read_back(iterator)
        if any(known() is loader for known in self.loaders):
            self._seen.append(value)
        if sys.modules["torch"].is_grad_enabled():
            self._is_kept = value == self.value

    def after_step(self, optimizer: Any) -> None:
        self._steps[self._is_kept] += 1

    def read_back(self, iterator: Any) -> Any:
        """Return the value in an iterator of torch; None without it."""
        return getattr(iterator, f"_{self.name}", None)

    def evidence(self) -> tuple[bool, str]:
        if not self._seen:
            return False, "The script did not iterate over the DataLoader."
        if self._steps[False] > self._steps[True]:
            return False, f"Most training steps were without {self.name}={self.value}."
        kept = self._seen.count(self.value)
        return kept > 0, f"{self.name} is {self.value} in {kept} of {len(self._seen)} iterators."

    def lines(self) -> list[str]:
        return [f"DataLoader(..., {self.name}={self.value})"]


class NumWorkers(LoaderSetting):
    name = "num_workers"
    bounds = (0, 256)
    needs_workers = False

    def problem(self, subject: dict[str, Any]) -> str | None:
        torch = sys.modules["torch"]
        dataset = subject["dataset"]
        if (found := super().problem(subject)) is not None or not self.value:
            return found
        if isinstance(dataset, torch.utils.data.IterableDataset):
            kind = type(dataset).__name__
            return f"{kind} is an IterableDataset, and each worker would yield all samples."
        if subject["num_workers"]:
            return None  # the script's own workers load this data set
        context = subject["multiprocessing_context"] or multiprocessing
        method = context if isinstance(context, str) else context.get_start_method(allow_none=True)
        method = method or multiprocessing.get_all_start_methods()[0]  # the default, not yet fixed
        if method != "fork":
            return f"Workers start by {method}, which imports the script again."
        if (found := _gpu_problem(subject)) is not None:
            return found
        if any(map(_is_open_file, _held(dataset))):
            return f"{type(dataset).__name__} has an open file, whose position workers would share."
        return None

    def enter(self, subject: dict[str, Any]) -> None:
        super().enter(subject)
        if not self.value:  # these arguments need workers
            subject |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
            subject["multiprocessing_context"] = None

    def read_back(self, iterator: Any) -> int:
        return sum(worker.is_alive() for worker in getattr(iterator, "_workers", ()))


class PinMemory(LoaderSetting):
    name = "pin_memory"
    needs_workers = False

    def problem(self, subject: dict[str, Any]) -> str | None:
        if not sys.modules["torch"].accelerator.is_available():
            return "pin_memory needs a GPU, and torch finds none."
        return super().problem(subject) or _gpu_problem(subject)


class PersistentWorkers(LoaderSetting):
    name = "persistent_workers"


class PrefetchFactor(LoaderSetting):
    name = "prefetch_factor"
    bounds = (1, 1024)


class NonBlocking(Setting):
    """Acts on `Tensor.to` and `Tensor.cuda` of pinned tensors that no operation has written."""

    name = "non_blocking"
    code = "inputs = inputs.to(device, non_blocking=True)"
    moment = Moment.IMPORT
    _copies = 0

    def problem(self, subject: Any) -> str | None:
        return None if subject.version.cuda else "non_blocking needs a GPU, and torch has no CUDA."

    def enter(self, subject: Any) -> None:
        self._torch = subject
        self._copied: list[weakref.ref[Any]] = []

    def copy(self, method: Any, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `to` or `cuda`, non-blocking if the tensor is pinned."""
        dtype = self._torch.dtype
        is_given = "non_blocking" in kwargs or not all(isinstance(one, dtype) for one in args[1:])
        if is_given or self.failed is not None or not self._is_unwritten(tensor):
            return method(tensor, *args, **kwargs)
        result = method(tensor, *args, **kwargs, non_blocking=True)
        if result.is_cuda:
            self._copies += 1
            self._copied.append(weakref.ref(tensor))
        return result

    def _is_unwritten(self, tensor: Any) -> bool:
        if type(tensor) is not self._torch.Tensor or not tensor.is_cpu or tensor.is_inference():
            return False
        return not tensor._version and bool(tensor.is_pinned())

    def after_step(self, optimizer: Any) -> None:
        sources = [reference() for reference in self._copied]
        self._copied.clear()
        if any(source is not None and source._version for source in sources):
            self.failed = "The script writes into a pinned tensor after its copy to the GPU."

    def evidence(self) -> tuple[bool, str]:
        if not self._copies:
            return False, "The script did not copy a pinned tensor to the GPU. Add pin_memory."
        return True, f"{self._copies} copies of pinned tensors to the GPU were non-blocking."


def _gpu_problem(subject: dict[str, Any]) -> str | None:
    """Return why batches may be on a GPU, where workers cannot use and torch cannot pin them."""
    torch = sys.modules["torch"]
    dataset = subject["dataset"]
    if any(torch.is_tensor(one) and one.is_cuda for one in _held(dataset)):
        return f"{type(dataset).__name__} has CUDA tensors."
    may_use = torch.cuda.is_initialized() and not subject["num_workers"]
    return "The collate_fn may use CUDA." if may_use and subject["collate_fn"] else None


def _held(dataset: Any, depth: int = 8) -> Iterator[Any]:
    """Yield some attributes of a data set and of those that it wraps, and items of containers."""
    for name, one in list(getattr(dataset, "__dict__", {}).items())[:100]:
        values = one.values() if type(one) is dict else one
        items = list(values)[:100] if type(one) in (dict, list, tuple) else [one]
        yield from items
        if name in ("dataset", "datasets") and depth:
            for inner in items:
                yield from _held(inner, depth - 1)


def _is_open_file(one: Any) -> bool:
    """Return True for files, also of libraries that read at a shared position."""
    kind = type(one)
    is_file = hasattr(kind, "fileno") or kind.__module__.partition(".")[0] in FILE_MODULES
    return is_file and not isinstance(one, (io.BytesIO, io.StringIO))
