"""Alerts: rules over what a run records, and their delivery. User documentation: `docs/alerts.md`.

| file           | contents                                                           |
|----------------|--------------------------------------------------------------------|
| `rules.py`     | a rule, the default rules, and the state of an alarm               |
| `settings.py`  | reads alerts.toml: rules, command and webhook                      |
| `evaluator.py` | evaluates all rules: which alarms were raised or cleared           |
| `monitor.py`   | collects the rows of the writer thread and returns events          |
| `notifier.py`  | runs the user's command and calls the webhook, in threads          |
| `crash.py`     | the alert of a killed process, sent by the dashboard's server      |
"""
