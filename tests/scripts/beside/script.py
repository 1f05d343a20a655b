"""A script that looks around: where it is, what is beside it, what it is given."""
# ruff: noqa: T201

import inspect
import linecache
import multiprocessing
import pickle
import sys

import commands
import helper_module
import output

import dashboard
import trainer

__test__ = False


class Thing:
    """Pickled by the name of its module, which has to be `__main__`."""


def square(number):
    return number * number, __name__


def main():
    print([name for name in globals() if name.startswith("__")])
    print(__name__, __doc__, __file__, __package__, __spec__ and __spec__.name, __cached__)
    print(sys.argv, sys.path[0], sys.stdin.read())
    print(type(__builtins__), type(__loader__), __loader__.name)
    print(sys.modules["__main__"].Thing is Thing, pickle.dumps(Thing()))
    print(inspect.getsource(square), linecache.getline(__file__, 1))
    print(sys.stdout.isatty(), sys.stdout.fileno(), sys.stdout.encoding, sys.stdout.errors)
    print(sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.line_buffering)
    print(sys.stdout is sys.__stdout__, type(sys.stdout.buffer).__name__, sys.stdout.name)
    print([module.WHO for module in (trainer, dashboard, commands, output, helper_module)])
    print(helper_module.from_main())
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(square, [3]))


if __name__ == "__main__":
    main()
else:
    print("imported as", __name__, flush=True)
