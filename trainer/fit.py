"""`python -m trainer.fit`: the former name of `python -m trainer.memory_estimate`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("trainer.memory_estimate", run_name="__main__", alter_sys=True)
