"""Bridges to other libraries, one a file: each imports its library, and nothing else does.

`huggingface` and `lightning` are callbacks for their trainers; `tensorboard` writes event files.
"""
