"""Open, read and replace files in folders whose content is untrusted.

Any name in a copied run folder can be a symbolic link, a FIFO, a device, or a file of any size.
Only the recorder writes into a folder of another user: other code checks `is_own_folder`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import pickle
import secrets
import select
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import psutil

from stepscope.common.json_values import parse_json


def is_own_folder(folder: Path) -> bool:
    """Return True if a folder belongs to the effective user of this process."""
    with contextlib.suppress(OSError):
        return os.stat(folder).st_uid == os.geteuid()
    return False


def modified_ns(path: Path | str) -> int:
    """Return the modification time of a file; 0 if there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


LOCAL_FILE_SYSTEMS = frozenset(
    {"bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "fuseblk", "iso9660"}
    | {"jfs", "msdos", "nilfs2", "ntfs", "ntfs3", "overlay", "ramfs", "reiserfs", "rootfs"}
    | {"squashfs", "tmpfs", "udf", "vfat", "xfs", "zfs"}
)
"""Types that only one host can mount. A FUSE type (`fuse.NAME`) may be a network's."""
WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


def open_regular_file(path: Path, *, follow_links: bool = False, writable: bool = False) -> int:
    """Open a regular file for reading, or also for writing, and return its descriptor.

    Never blocks. Raises OSError for any other kind of file, for a link unless `follow_links`.
    """
    flags = os.O_RDWR if writable else os.O_RDONLY
    return _open_regular(path, flags | (0 if follow_links else os.O_NOFOLLOW))


def open_for_append(path: Path, *, truncate: bool = False) -> int:
    """Open or create a regular file for appending; never blocks. Raises OSError for a link."""
    descriptor = _open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    if truncate:
        os.ftruncate(descriptor, 0)
    return descriptor


def _open_regular(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_regular_file(path: Path, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """Return the content of a regular file. Raises ValueError if it is larger, or OSError."""
    with open(open_regular_file(path, follow_links=follow_links), "rb") as file:
        # A buffer of `max_bytes` would cost more than the read.
        data = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path.name}: must have at most {max_bytes} bytes, got more")
    return data


def read_tail(path: Path, max_bytes: int) -> str:
    """Return the text of the last `max_bytes` of a regular file. Raises OSError."""
    with open(open_regular_file(path), "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
        return file.read(max_bytes).decode(errors="replace")


def read_json(path: Path, max_bytes: int, *, follow_links: bool = False) -> Any:
    """Return the value of a JSON file of at most `max_bytes`, as `parse_json` does.

    Raises ValueError for a file that is larger or invalid; OSError as `open_regular_file`.
    """
    data = read_regular_file(path, max_bytes, follow_links=follow_links)
    try:
        return parse_json(data.decode())
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


class PlainUnpickler(pickle.Unpickler):
    """Reads pickles of plain containers, numbers and text; nothing is imported or called."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse a class or function."""
        named = f"{module}.{name}"[:100]
        raise pickle.UnpicklingError(f"it names {named!r}, and only plain containers are read")

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse an object that is stored elsewhere."""
        raise pickle.UnpicklingError("it refers to objects outside of it")


@contextlib.contextmanager
def atomic_replace(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file in the folder of `path`; it replaces `path` when the block ends.

    After an exception the previous file is unchanged. The new file has a random name and is created
    exclusively: no planted link receives the data. `durable` waits for the disk (5 ms): a power
    failure leaves no empty file. Raises OSError.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    with part.open("xb") as file:  # O_EXCL: never opens an existing file or link
        try:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


def atomic_write(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace the content of a file; text is written as UTF-8. Raises OSError."""
    with atomic_replace(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def try_lock(descriptor: int) -> bool | None:
    """Lock a file exclusively, without waiting; return False if another process holds the lock.

    Returns None if the file system has no locks. NFS locks only files that are open for writing.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return None
    return True


def is_network_filesystem(path: Path) -> bool:
    """Return True if other hosts may write to the file system of `path`, which need not exist.

    True for every type but LOCAL_FILE_SYSTEMS.
    """
    path, kind = path.resolve(), ""
    for mount in psutil.disk_partitions(all=True):
        if path.is_relative_to(mount.mountpoint):  # a later mount is on top, or covers an earlier
            kind = mount.fstype
    return bool(kind) and kind not in LOCAL_FILE_SYSTEMS


TOUCHED, REPLACED = 0x4, 0x80
"""IN_ATTRIB and IN_MOVED_TO of <sys/inotify.h>: folder changes that may end a sleep."""


class WakeableSleep:
    """Sleep of one thread that any thread ends by `wake`.

    With `sees_touches`, `os.utime(folder)`, or with REPLACED a file moved into it, also ends the
    sleep; False without inotify instances (128 a user by default). Raises OSError.
    """

    def __init__(self, folder: Path, change: int = TOUCHED) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Closed only with the object: a late `wake` must not write into a file that reuses it.
        weakref.finalize(self, os.close, self._event).atexit = False
        self._touches = _inotify(folder, change)
        self.sees_touches = self._touches is not None
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        if self._touches is not None:
            self._close_touches = weakref.finalize(self, os.close, self._touches)
            self._close_touches.atexit = False
            self._poll.register(self._touches, select.POLLIN)

    def wake(self) -> None:
        """End the present or the next sleep. Thread-safe."""
        with contextlib.suppress(OSError):  # a script that becomes a daemon closes all files
            os.eventfd_write(self._event, 1)

    def sleep(self, timeout_s: float) -> bool:
        """Sleep for `timeout_s`, until `wake`, or until a touch; return True only for `wake`."""
        ready = dict(self._poll.poll(max(0.0, 1e3 * timeout_s)))
        if self._event not in ready:
            return False
        os.eventfd_read(self._event)
        return True

    def forget_touches(self) -> None:
        """Discard past touches, so that they do not end the next sleep."""
        if self._touches is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._touches, 4096)

    def close(self) -> None:
        """Close the inotify instance; call it in the thread that sleeps."""
        if self._touches is not None:
            self._close_touches()
            self._touches = None


def _inotify(folder: Path, change: int) -> int | None:
    """Return an inotify descriptor for this change of the folder; None without one."""
    libc = ctypes.CDLL(None)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(folder), change) < 0:
        os.close(descriptor)
        return None
    return int(descriptor)
