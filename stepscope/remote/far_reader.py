"""Read run folders on another host, for `stepscope ui ssh://…`; Python 3.6, standard library only.

This file is sent over the connection and runs there as `python3 -c`. It answers each line of JSON
on stdin with one frame on stdout (4 bytes with the length, then deflated JSON) and ends with stdin.
It writes only rows of the table `commands` in a run's own store.
"""

import base64
import json
import os
import re
import signal
import socket
import sqlite3
import stat
import struct
import sys
import time
import zlib
from contextlib import closing
from itertools import islice
from urllib.parse import quote

MAGIC = b"stepscope remote 1\n"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
WHOLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\.(?:json|txt|toml)")
APPENDED = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\.log")
LARGE = re.compile(
    r"(?:snapshot-[A-Za-z0-9_.-]{1,100}\.pickle|profile-step-[A-Za-z0-9_.-]{1,60}\.json\.gz)"
)
METADATA = re.compile(r"(?:run|rank[1-9][0-9]{0,5})\.json")
STORE = re.compile(r"rank(0|[1-9][0-9]{0,5})\.sqlite")
MAX_RUNS = 200
MAX_WHOLE_BYTES = 4 * 2**20
MAX_LARGE_BYTES = 256 * 2**20
MAX_BLOB_BYTES = 8 * 2**20
MAX_TEXT = 2**20
CHUNK_BYTES = 256 * 1024
ANSWER_BYTES = 2**20  # of the list, and of the runs: a part ends after the item that exceeds it
FRAME_ROWS = 256  # of `stepscope.store.blocks`
LEVELS = 12
STALE_S = 10.0
LIST_S = 5.0  # interval at which the list of runs is read, and runs without a heartbeat
ENDED_S = 30.0  # interval at which ended runs are read
SILENCE_S = 60  # without a request for this long the connection is lost
LIVE = ("pending", "running", "paused")
UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError),
    sqlite3.Error,
)
TABLES = (
    ("series", "id, stream, source"),
    ("layouts", "id, keys"),
    ("events", "id, ts, step, epoch, kind, text, data"),
)


class FarReader:
    """Answers the requests of one connection about the runs in `root`."""

    def __init__(self, root):
        self.root = os.path.expanduser(root)
        self.known = {}  # signature of run.json, and the time of the next reading, by run id
        self.names = []
        self.listed_at = -LIST_S
        self.foreign = {}  # True for a run that another host writes, by run id
        self.live = {}
        self.left = 0

    def answer(self, request):
        """Return the answer to a request of `stepscope.remote.source`."""
        found = {"commands": [self.submit(*row) for row in request.get("commands", ())]}
        found["now"] = time.monotonic()
        if not os.path.isdir(self.root):
            found["error"] = f"there is no folder {self.root}"
            return found
        self.left = ANSWER_BYTES
        live = request.get("live", ())  # runs that the mirror shows as live
        found["runs"] = self.list_names(live)
        found["gone"] = [run for run in live if run not in self.names and not self.exists(run)]
        found["listed"] = self.list_runs(request.get("known") or {})
        found["more"] = self.left <= 0
        self.left = ANSWER_BYTES
        wanted = [run for run in request.get("follow", {}).items() if RUN_ID.fullmatch(run[0])]
        found["follow"] = {run: self.follow(run, cursor) for run, cursor in wanted}
        for run, cursor in wanted:
            self.follow_files(run, cursor, found["follow"][run])
        found["more"] |= self.left <= 0
        return found

    def exists(self, run):
        """Return False if a run has no run.json; True also if that cannot be known."""
        try:
            return stat.S_ISREG(os.stat(os.path.join(self.root, run, "run.json")).st_mode)
        except FileNotFoundError:
            return False
        except OSError:  # such as a stale handle of NFS
            return True

    def list_names(self, live):
        """Return the run ids that are `live`, then the newest, by name."""
        now = time.monotonic()
        if now - self.listed_at > LIST_S:
            self.listed_at = now
            names = filter(RUN_ID.fullmatch, os.listdir(self.root))
            names = sorted(names, key=lambda name: (name in live, name), reverse=True)
            self.names = list(islice(filter(self.exists, names), MAX_RUNS))
        return self.names

    def list_runs(self, known):
        """Return run.json of each listed run that has changed since the last answer."""
        for run, signature in known.items():
            self.known.setdefault(run, (signature, 0.0))
        found, now = {}, time.monotonic()
        for run in sorted(self.names, key=lambda run: self.known.get(run, (None, 0.0))[1]):
            signature, until = self.known.get(run, (None, 0.0))
            if self.left <= 0 or now < until:
                break
            wait_s = ENDED_S
            try:
                file = self.read_whole(run, "run.json", signature)
                if file is not None:
                    found[run], signature = file, file["signature"]
                live = signature[2]
                if live is not None:
                    wait_s = LIST_S if live[1] else 0.0
            except UNREADABLE:
                pass  # another program's run.json, or one that is being removed
            self.known[run] = signature, now + wait_s
        return found

    def follow(self, run, cursor):
        """Return what is new, and which small files are gone, in a run after a cursor."""
        folder = os.path.join(self.root, run)
        found = {"files": [], "gone": [], "stores": {}}
        try:
            if run not in self.foreign:
                self.read_whole(run, "run.json", None)
            names = sorted(os.listdir(folder))
            found["gone"] = list(set(filter(WHOLE.fullmatch, cursor["seen"])).difference(names))
            for name in names:
                number = STORE.fullmatch(name)
                if self.left <= 0:
                    break
                if number is not None:
                    new = self.read_store(run, name, cursor["stores"].get(number[1]) or {})
                    found["stores"].update({} if new is None else {number[1]: new})
                elif WHOLE.fullmatch(name) and not (name == "run.json" and run in self.names):
                    file = self.read_whole(run, name, cursor["seen"].get(name))
                    found["files"].extend([] if file is None else [file])
        except UNREADABLE as error:
            found["error"] = f"{type(error).__name__}: {error}"
        return found

    def follow_files(self, run, cursor, found):
        """Add the next bytes of a run's files of any size."""
        try:
            for name in sorted(os.listdir(os.path.join(self.root, run))):
                if self.left <= 0:
                    break
                large = LARGE.fullmatch(name)
                if APPENDED.fullmatch(name) or (large and cursor["large"]):
                    size, inode = cursor["sizes"].get(name, (0, None))
                    found["files"].extend(self.read_rest(run, name, size, inode, bool(large)))
        except UNREADABLE as error:
            found["error"] = f"{type(error).__name__}: {error}"

    def read_whole(self, run, name, seen):
        """Return a small file; None if its signature is `seen`. Raises UNREADABLE."""
        path = os.path.join(self.root, run, name)
        status = os.lstat(path)
        metadata = METADATA.fullmatch(name)
        same = [status.st_mtime_ns, status.st_size] == (seen or [])[:2]
        if same and (not metadata or (seen[2] is None and run in self.foreign)):
            return None
        data, status = read_file(path, 0, MAX_WHOLE_BYTES)
        signature = [status.st_mtime_ns, status.st_size, None]
        facts = self.facts(run, name, json.loads(data.decode()), status) if metadata else None
        if facts is not None and facts["status_live"]:
            signature[2] = [facts["alive"], facts["age_s"] > STALE_S]
        if signature == seen:
            return None
        self.left -= len(data)
        file = {"name": name, "offset": None, "data": encode(data), "signature": signature}
        return dict(file, facts=facts)

    def read_rest(self, run, name, start, inode, large):
        """Return the next bytes of a file that grows, as a list of one file or none."""
        path = os.path.join(self.root, run, name)
        status = os.lstat(path)
        if status.st_size > MAX_LARGE_BYTES:
            return []
        replaced = inode != status.st_ino and not large  # a log has been rotated
        start = 0 if status.st_size < start or replaced else start
        if status.st_size == start and not (replaced and start == 0):
            return []
        data, _ = read_file(path, start, CHUNK_BYTES)
        # One chunk an answer, so that rows do not wait for it.
        self.left -= ANSWER_BYTES if start + len(data) < status.st_size else len(data)
        file = {"name": name, "offset": start, "data": encode(data)}
        return [dict(file, signature=[status.st_ino, 0, None])]

    def facts(self, run, name, content, status):
        """Return what only this host knows of a run or rank: age, process, rights."""
        beat = max(float(content["heartbeat"]), status.st_mtime)
        age_s = min(max(0.0, time.time() - beat), 1e9)
        alive = is_alive(content)
        status_live = content["status"] in LIVE
        live = status_live and (age_s < STALE_S if alive is None else alive)
        if name == "run.json":
            self.foreign[run] = content.get("host") != socket.gethostname()
            self.live[run] = live
        reason = self.refusal(run) if name == "run.json" else None
        facts = {"live": live, "age_s": age_s, "alive": alive, "reason": reason}
        return dict(facts, status_live=status_live)

    def refusal(self, run):
        """Return why this user must not write commands into a run's store; None if allowed."""
        folder = os.path.join(self.root, run)
        store = os.path.join(folder, "rank0.sqlite")
        try:
            owners = {os.lstat(path).st_uid for path in (folder, store)}
            regular = stat.S_ISREG(os.lstat(store).st_mode)
        except OSError:
            return "Its store cannot be read on the remote host."
        if owners != {os.geteuid()} or not regular:
            return "It belongs to another user of the remote host."
        if self.is_of_another_host(run, store):
            return "Its store is on a local disk of that host, which alone may write to it."
        return None if os.access(store, os.W_OK) else "The remote folder is read-only."

    def is_of_another_host(self, run, store):
        """Return True if another host has this store in WAL mode.

        Opening it here would damage its index (https://www.sqlite.org/wal.html).
        """
        return self.foreign.get(run, True) and read_file(store, 0, 20)[0][18:] != b"\x01\x01"

    def submit(self, run, number, name, args, deadline):
        """Add a command to a run's store, once; return its id and why it was refused, or None.

        `deadline` is a time of this host's monotonic clock: the command may have waited in ssh.
        """
        try:
            refused = self.refusal(run) if RUN_ID.fullmatch(run) else "Unknown run."
            if time.monotonic() > deadline:
                refused = "It arrived too late."
            elif not self.live.get(run):
                refused = refused or "The run has ended."
            if refused is None:
                folder = os.path.join(self.root, run)
                path = "file:{}?mode=rw".format(quote(os.path.join(folder, "rank0.sqlite")))
                store = sqlite3.connect(path, timeout=5, uri=True, isolation_level=None)
                with closing(store):
                    store.execute(
                        "INSERT OR IGNORE INTO commands (id, asked_ts, name, args) "
                        "VALUES (?, ?, ?, ?)",
                        (number, time.time(), name, args),
                    )
                os.utime(folder)  # wakes the run's writer thread
        except UNREADABLE as error:
            refused = f"The command was not stored on the remote host ({error})."
        return [run, number, refused]

    def read_store(self, run, name, cursor):
        """Return the rows of a store after `cursor`; None without a change. Raises UNREADABLE."""
        path = os.path.join(self.root, run, name)
        if not stat.S_ISREG(os.lstat(path).st_mode) or self.is_of_another_host(run, path):
            raise OSError(f"{name} cannot be read from this host")
        signature = [modified(path), modified(path + "-wal")]
        if cursor.get("signature") == signature:
            return None
        with closing(open_store(path)) as store:
            store.execute("BEGIN")
            version = store.execute("PRAGMA user_version").fetchone()[0]
            found = {"version": version, "frames": []}
            for table, columns in TABLES:
                found[table] = []
                rows = store.execute(
                    f"SELECT {columns} FROM {table} WHERE id > ? ORDER BY id",
                    (cursor.get(table, 0),),
                )
                for row in rows:
                    if self.left <= 0:
                        break
                    if is_plain(row):
                        found[table].append(row)
                        self.left -= 20 + sum(len(text) for text in row if isinstance(text, str))
            series = [row[0] for row in store.execute("SELECT id FROM series LIMIT 1000")]
            for number in series:
                ends = cursor.get("frames", {}).get(str(number), [])
                for level in range(LEVELS):
                    end = ends[level] if level < len(ends) else 0
                    if not self.read_frames(store, found["frames"], number, level, end):
                        break
        found["signature"] = signature if self.left > 0 else None
        return found

    def read_frames(self, store, frames, series, level, end):
        """Append the frames with rows from `end` on; return False if the level has no frame."""
        rows = store.execute(
            "SELECT first, rows, layout, ts_end, step_end, data FROM frames WHERE series = ? "
            "AND level = ? AND first >= ? AND first + rows > ? AND length(data) <= ? "
            "ORDER BY first",
            (series, level, end - end % FRAME_ROWS, end, MAX_BLOB_BYTES),
        )
        some = end > 0
        for row in rows:
            some = True
            if self.left <= 0:
                break
            data = row[-1]
            if is_plain(row[:-1]) and isinstance(data, bytes):
                self.left -= len(data) + 60
                frames.append([series, level, *row[:-1], encode(data)])
        return some


def is_plain(row):
    """Return True if JSON has all values of a row: SQLite has no types of columns."""
    for value in row:
        if isinstance(value, str):
            if len(value) > MAX_TEXT:
                return False
        elif not isinstance(value, (int, float)) or not abs(value) <= 2**53:
            return False
    return True


def is_alive(content):
    """Return whether the process of a run exists; None if it is of another host or container."""
    try:
        boot = read_file("/proc/sys/kernel/random/boot_id", 0, 100)[0].decode().strip()
        namespace = "{}/{}".format(boot, os.stat("/proc/self/ns/pid").st_ino)
        if (content["host"], content["pid_namespace"]) != (socket.gethostname(), namespace):
            return None
        text = read_file("/proc/{}/stat".format(int(content["pid"])), 0, 4096)[0].decode()
        ticks = text.rpartition(")")[2].split()
        return ticks[0] != "Z" and int(ticks[19]) == content["pid_ticks"]
    except FileNotFoundError:
        return False
    except UNREADABLE:
        return None


def open_store(path):
    """Return a read-only connection. Raises sqlite3.Error."""
    address = f"file:{quote(path)}?mode=ro"
    if not os.access(os.path.dirname(path), os.W_OK) and not os.path.exists(path + "-journal"):
        address += "&immutable=1"  # a store in WAL mode does not open otherwise
    store = sqlite3.connect(address, timeout=2, uri=True, isolation_level=None)
    store.text_factory = lambda text: text.decode("utf-8", "replace")
    return store


def modified(path):
    """Return modification time and size of a file; None without one."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_size]


def read_file(path, start, limit):
    """Return bytes of a regular file from `start`, and its status. Raises OSError, ValueError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        if limit == MAX_WHOLE_BYTES and status.st_size > limit:
            raise ValueError(f"has more than {limit} bytes")
        file.seek(start)
        return file.read(limit), status


def encode(data):
    """Return bytes as text for JSON."""
    return base64.b64encode(data).decode()


def main():
    """Answer requests until stdin ends; the first line has the folder of the runs."""
    out, source = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # no other output may come between two frames
    os.nice(10)
    out.write(MAGIC)
    out.flush()
    reader = FarReader(json.loads(source.readline().decode())["root"])
    signal.alarm(SILENCE_S)  # its default action ends this process, also within a query
    for line in iter(source.readline, b""):
        signal.alarm(SILENCE_S)
        try:
            text = json.dumps(reader.answer(json.loads(line.decode())), allow_nan=False)
        except UNREADABLE as error:
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        data = zlib.compress(text.encode(), 6)
        out.write(struct.pack(">I", len(data)) + data)
        out.flush()


if __name__ == "__main__":
    main()
