"""Reports: a run or a sweep as one HTML file without scripts and external references."""
