"""Runs lessons in forks of this process, which has imported torch once: forked_lessons.py ROOT.

Standard input is JSON: for each lesson its name, path, number of ranks and a free port. A lesson
runs in the folder ROOT/NAME and prints into ROOT/NAME.out and ROOT/NAME.err. Prints JSON: the exit
code of each lesson, of several ranks the highest.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed


def become(lesson: dict[str, Any], root: Path, rank: int) -> NoReturn:
    """Run the lesson in this process as one rank, and end the process."""
    name, path = lesson["name"], lesson["path"]
    for number, end in ((1, "out"), (2, "err")):
        file = os.open(root / f"{name}.{end}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, number)
    if lesson["ranks"] > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": lesson["ranks"]}
        os.environ |= {key: str(value) for key, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(lesson["port"])}
        torch.set_num_threads(1)
    os.chdir(root / name)
    sys.argv, sys.path[0] = [path], str(Path(path).parent)
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # noqa: BLE001 - printed, as the interpreter would
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    root, codes = Path(sys.argv[1]), {}
    for lesson in json.load(sys.stdin):
        (root / lesson["name"]).mkdir()
        ranks = []
        for rank in range(lesson["ranks"]):
            if (pid := os.fork()) == 0:
                become(lesson, root, rank)
            ranks.append(pid)
        ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        codes[lesson["name"]] = max(ended, key=abs)
    sys.stdout.write(json.dumps(codes))


if __name__ == "__main__":
    main()
