"""`bigtrain doctor`: examines this machine, and with `--check` runs what bigtrain promises.

Decides: which parts of a machine are examined and how a missing one is installed; which checks run,
and the rule that each must meet; what `check.json` holds.
"""
