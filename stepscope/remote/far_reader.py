"""Read run folders on another host, for `stepscope ui ssh://…`; Python 3.6, standard library only.

This file is sent over the connection and runs there as `python3 -c`. It answers each line of JSON
on stdin with one on stdout and ends with stdin. What it has sent over this connection is not sent
again. It writes only rows of the table `commands` in a run's own store.
"""

import base64
import json
import os
import re
import signal
import socket
import sqlite3
import stat
import sys
import time
from collections import defaultdict
from contextlib import closing, suppress
from itertools import islice
from urllib.parse import quote

MAGIC = b"stepscope remote 1\n"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
WHOLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\.(?:json|txt|toml)")
GROWING = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\.log"
    r"|snapshot-[A-Za-z0-9_.-]{1,100}\.pickle|profile-step-[A-Za-z0-9_.-]{1,60}\.json\.gz"
)
METADATA = re.compile(r"(?:run|rank[1-9][0-9]{0,5})\.json")
STORE = re.compile(r"rank(?:0|[1-9][0-9]{0,5})\.sqlite")
MAX_RUNS = 200
MAX_WHOLE_BYTES = 4 * 2**20
MAX_VALUE_BYTES = 4 * 2**20  # of the last column of a row
MAX_GROWING_BYTES = 256 * 2**20
CHUNK_BYTES = 256 * 1024  # of a growing file, in one answer
ANSWER_BYTES = 2**20  # an answer ends after the item that exceeds it
STALE_S = 10.0
LIST_S = 5.0  # interval at which the list of runs is read
LATE_S = 30.0  # age from which a command is refused: it may have waited in ssh
SILENCE_S = 60  # without a request for this long the connection is lost
LIVE = ("pending", "running", "paused")
UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError),
    sqlite3.Error,
)
TABLES = {
    "series": "id, stream, source",
    "layouts": "id, keys",
    "events": "id, ts, step, epoch, kind, text, data",
    "frames": "rowid, series, level, first, rows, layout, ts_end, step_end, data",
}
"""Columns, first the number of the row: the writer replaces a frame by one with a higher rowid."""


class FarReader:
    """Answers the requests of one connection about the runs in `root`."""

    def __init__(self, root):
        self.root = os.path.expanduser(root)
        self.names = []
        self.listed_at = -LIST_S
        self.unread = []  # listed runs whose run.json is to be read
        self.sent = defaultdict(dict)  # what has been sent of each file, by run and name
        self.cursors = {}  # last row sent of each table, by run and store
        self.foreign = {}  # True for a run that another host writes
        self.live = {}  # True for a live run
        self.left = 0

    def answer(self, request):
        """Return the answer to a request of `stepscope.remote.source`. Raises OSError."""
        self.left = ANSWER_BYTES
        follow = request["follow"]  # whether large files are requested, by run
        late = time.monotonic() - request["now"] > LATE_S
        answer = {"commands": [self.submit(late, *command) for command in request["commands"]]}
        answer["now"] = time.monotonic()
        for run, start in request["start"].items():
            self.sent[run].update(start["files"])
            self.cursors[run] = start["stores"]
        if time.monotonic() - self.listed_at > LIST_S:
            answer["runs"] = self.list_runs(follow)
        found = {}
        while self.unread and self.left > 0:
            run = self.unread.pop()
            if run not in follow:
                with suppress(*UNREADABLE):  # another program's run.json, or a removed one
                    found[run] = {"files": self.read_whole(run, "run.json")}
        for run in follow:
            found[run] = self.follow(run)
        for run, with_large in follow.items():
            self.add_growing(run, with_large, found[run])
        answer["found"] = {run: json.dumps(new) for run, new in found.items()}
        answer["more"] = self.left <= 0
        return answer

    def list_runs(self, follow):
        """Return the ids of the runs that are followed or live, then of the newest."""

        def exists(run):
            return os.path.exists(os.path.join(self.root, run, "run.json"))

        def order(run):
            return run in follow or self.live.get(run, False), run

        names = sorted(filter(RUN_ID.fullmatch, os.listdir(self.root)), key=order, reverse=True)
        self.names = list(islice(filter(exists, names), MAX_RUNS))
        self.listed_at = time.monotonic()
        self.unread = self.names[::-1]
        for run in set(self.sent).difference(self.names):
            del self.sent[run]  # it may return
        return self.names

    def follow(self, run):
        """Return the names of the small files of a run, and those and the rows that are new."""
        new = {"files": [], "stores": {}}
        try:
            names = sorted(os.listdir(os.path.join(self.root, run)))
            small = list(filter(WHOLE.fullmatch, names))
            for name in small:
                new["files"] += self.read_whole(run, name)
            for name in filter(STORE.fullmatch, names):
                self.read_store(run, name, new["stores"])
            new["names"] = small
        except UNREADABLE as error:
            new["error"] = describe(error)
        return new

    def add_growing(self, run, with_large, new):
        """Add the next bytes of a run's logs, and of its snapshots and traces if requested."""
        try:
            for name in sorted(os.listdir(os.path.join(self.root, run))):
                if GROWING.fullmatch(name) and (with_large or name.endswith(".log")):
                    new["files"] += self.read_rest(run, name)
        except UNREADABLE as error:
            new["error"] = describe(error)

    def read_whole(self, run, name):
        """Return a list of a small file, empty if it is unchanged. Raises UNREADABLE."""
        path = os.path.join(self.root, run, name)
        status = os.lstat(path)
        facts = self.facts(run, name) if METADATA.fullmatch(name) else {}
        state = [status.st_mtime_ns, status.st_size, facts.get("live"), facts.get("reason")]
        if state == self.sent[run].get(name) or self.left <= 0 or state[1] > MAX_WHOLE_BYTES:
            return []
        data = read_file(path)
        self.sent[run][name] = state
        self.left -= len(data)
        return [{"name": name, "data": encode(data), "facts": facts or None}]

    def read_rest(self, run, name):
        """Return a list of the next bytes of a file that grows, empty if there are none."""
        path = os.path.join(self.root, run, name)
        status = os.lstat(path)
        inode, start = self.sent[run].get(name, (None, 0))
        if status.st_size < start or inode not in (None, status.st_ino):  # a log was rotated
            start = 0
        if status.st_size in (start, 0) or status.st_size > MAX_GROWING_BYTES or self.left <= 0:
            return []
        data = read_file(path, start, CHUNK_BYTES)
        self.sent[run][name] = status.st_ino, start + len(data)
        self.left -= len(data)
        return [{"name": name, "offset": start, "data": encode(data)}]

    def read_store(self, run, name, stores):
        """Add the rows of a store after its cursor to `stores`. Raises UNREADABLE."""
        path = os.path.join(self.root, run, name)
        is_wal = is_in_wal_mode(path)
        if self.foreign[run] and is_wal:
            raise OSError(f"{name} cannot be read from this host")
        cursor = self.cursors.setdefault(run, {}).setdefault(name, {})
        state = [modified(path), modified(path + "-wal")]
        if self.left <= 0 or state == cursor.get("state"):
            return
        # Without a log there is no writer, and none of its files are needed or made.
        mode = "ro&immutable=1" if is_wal and state[1] is None else "ro"
        with closing(open_store(path, mode)) as store:
            store.execute("BEGIN")
            new = {"version": store.execute("PRAGMA user_version").fetchone()[0]}
            for table, columns in TABLES.items():
                new[table] = []
                largest = columns.split()[-1]
                rows = store.execute(
                    f"SELECT {columns} FROM {table} WHERE rowid > ? AND length({largest}) <= ? "
                    "ORDER BY rowid",
                    (cursor.get(table, 0), MAX_VALUE_BYTES),
                )
                for row in rows:
                    if self.left <= 0:
                        break
                    values = [encode(one) if isinstance(one, bytes) else one for one in row]
                    new[table].append(values)
                    self.left -= len(json.dumps(values))
                    cursor[table] = row[0]
        cursor["state"] = state if self.left > 0 else None
        stores[name] = new

    def facts(self, run, name):
        """Return what only this host knows of a run or rank: age, process, rights."""
        path = os.path.join(self.root, run, name)
        content = json.loads(read_file(path).decode())
        beat = max(float(content["heartbeat"]), os.lstat(path).st_mtime)
        age_s = min(max(0.0, time.time() - beat), 1e9)
        alive = is_alive(content)
        live = content["status"] in LIVE and (age_s < STALE_S if alive is None else alive)
        facts = {"live": live, "age_s": age_s, "alive": alive, "reason": None}
        if name == "run.json":
            self.foreign[run] = content.get("host") != socket.gethostname()
            self.live[run] = live
            facts["reason"] = self.refusal(run)
        return facts

    def refusal(self, run):
        """Return why this user must not write commands into a run's store; None if allowed."""
        folder = os.path.join(self.root, run)
        store = os.path.join(folder, "rank0.sqlite")
        try:
            owners = {os.lstat(path).st_uid for path in (folder, store)}
            is_wal = is_in_wal_mode(store)
        except OSError:
            return "Its store cannot be read on the remote host."
        if owners != {os.geteuid()}:
            return "It belongs to another user of the remote host."
        # Opening it here would damage its index (https://www.sqlite.org/wal.html).
        if is_wal and self.foreign.get(run, True):
            return "Its store is on a local disk of that host, which alone may write to it."
        return None if os.access(store, os.W_OK) else "The remote folder is read-only."

    def submit(self, late, run, number, name, args):
        """Add a command to a run's store, once; return its id and why it was refused, or None."""
        try:
            refused = self.refusal(run)
            if late:
                refused = "It arrived too late."
            elif not self.live.get(run):
                refused = refused or "The run has ended."
            if refused is None:
                folder = os.path.join(self.root, run)
                with closing(open_store(os.path.join(folder, "rank0.sqlite"), "rw")) as store:
                    store.execute(
                        "INSERT OR IGNORE INTO commands (id, asked_ts, name, args) "
                        "VALUES (?, ?, ?, ?)",
                        (number, time.time(), name, args),
                    )
                os.utime(folder)  # wakes the run's writer thread
        except UNREADABLE as error:
            refused = "The command was not stored on the remote host: " + describe(error)
        return [run, number, refused]


def is_alive(content):
    """Return whether the process of a run exists; None if it is of another host or container."""
    try:
        boot = read_file("/proc/sys/kernel/random/boot_id", 0, 100).decode().strip()
        namespace = "{}/{}".format(boot, os.stat("/proc/self/ns/pid").st_ino)
        if (content["host"], content["pid_namespace"]) != (socket.gethostname(), namespace):
            return None
        text = read_file("/proc/{}/stat".format(int(content["pid"])), 0, 4096).decode()
        ticks = text.rpartition(")")[2].split()
        return ticks[0] != "Z" and int(ticks[19]) == content["pid_ticks"]
    except FileNotFoundError:
        return False
    except UNREADABLE:
        return None


def is_in_wal_mode(store):
    """Return True if one host only may open this SQLite file, by its header. Raises OSError."""
    return read_file(store, 0, 20)[18:] != b"\x01\x01"


def open_store(path, mode):
    """Return a connection. Raises sqlite3.Error."""
    address = f"file:{quote(path)}?mode={mode}"
    store = sqlite3.connect(address, timeout=5, uri=True, isolation_level=None)
    store.text_factory = lambda text: text.decode("utf-8", "replace")
    return store


def modified(path):
    """Return modification time and size of a file; None without one."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_size]


def read_file(path, start=0, limit=MAX_WHOLE_BYTES):
    """Return bytes of a regular file from `start`. Raises OSError for a link."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("not a regular file")
        file.seek(start)
        return file.read(limit)


def encode(data):
    """Return bytes as text for JSON."""
    return base64.b64encode(data).decode()


def describe(error):
    """Return the type and the message of an exception."""
    return f"{type(error).__name__}: {error}"


def main():
    """Answer requests until stdin ends; the first line has the folder of the runs."""
    out, source = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # no other output may come between two answers
    os.nice(10)
    out.write(MAGIC)
    out.flush()
    reader = FarReader(json.loads(source.readline().decode()))
    signal.alarm(SILENCE_S)  # its default action ends this process, also within a query
    for line in iter(source.readline, b""):
        signal.alarm(SILENCE_S)
        try:
            answer = reader.answer(json.loads(line.decode()))
        except UNREADABLE as error:
            answer = {"error": describe(error)}
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
