"""Alerts: rules over what a run records, and what is done when one of them holds.

| file           | what it does                                                              |
|----------------|---------------------------------------------------------------------------|
| `rules.py`     | a rule over a metric, the default rules, and the state of an alarm        |
| `evaluator.py` | checks all rules once a second: what was raised, what was cleared         |
| `monitor.py`   | sees the rows that the writer thread stores; writes events                |
| `config.py`    | reads the rules of alerts.toml                                            |
| `channels.py`  | reads the command and the webhook of alerts.toml                          |
| `notifier.py`  | the thread that runs the user's command and calls the webhook             |
| `webhook.py`   | one delivery to a webhook                                                 |

`crash.py` tells of runs whose process was killed; the dashboard's server calls it.
What a user may set, and who notices what: `docs/alerts.md`.
"""
