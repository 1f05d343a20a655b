"""PyTorch's memory snapshots: which lines of a program hold how much GPU memory, and since when.

Files are untrusted: nothing in them is ever called. Nothing here imports torch.
"""
