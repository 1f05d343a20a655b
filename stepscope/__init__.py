"""Stepscope's telemetry library: runs, metrics, the sampler and the store.

It imports neither torch nor streamlit, so that a training script can import it at no cost.
"""

__version__ = "0.1.0"
