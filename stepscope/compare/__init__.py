"""Compare recorded runs: figures of a run, differences, and intervals over runs."""
