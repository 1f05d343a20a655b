"""Alerts: rules over what a run records, and their delivery. User documentation: docs/alerts.md."""
