"""Alerts: rules over what a run records, and what is done when one of them holds.

| file            | what it does                                                             |
|-----------------|--------------------------------------------------------------------------|
| `rules.py`      | a rule over a metric, the default rules, and the state of an alarm       |
| `conditions.py` | when the default rules hold that need more than one number               |
| `judge.py`      | one look a second at all rules: what was raised, what was cleared        |
| `seen.py`       | what was recorded since the last look, a span for each metric            |
| `watch.py`      | sees the rows that the writer thread stores; writes events               |
| `config.py`     | reads alerts.toml: `checks.py` its rules, `ways.py` whom to tell         |
| `actions.py`    | the thread that runs the user's command and calls the webhook            |
| `command.py`, `webhook.py` | one delivery each                                             |

`crash.py` tells of runs whose process was killed; the dashboard's server calls it.
What a user may set, and who notices what: `docs/alerts.md`.
"""
