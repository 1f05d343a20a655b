"""How fast this machine's collectives are, by operation and size: `python -m trainer.collectives`.

process.py starts torchrun, which starts rank.py once a rank; rank 0 prints a JSON line for each
result. The figures are those of nccl-tests (`stepscope/distributed/collective_metrics.py`).
"""
