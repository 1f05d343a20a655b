"""Runs of other hosts, received over ssh."""
