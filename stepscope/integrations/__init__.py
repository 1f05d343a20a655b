"""Callbacks for other libraries; only these modules import the libraries."""
