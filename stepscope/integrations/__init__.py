"""Bridges to other libraries, one a file: each imports its library, and nothing else does."""
