"""PyTorch's memory snapshots: untrusted files, of which nothing is called. No import of torch."""
