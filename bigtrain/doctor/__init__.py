"""`bigtrain doctor`: examines this machine, and with `--check` tests what bigtrain promises.

Decides which parts of a machine are examined and how a missing part is installed; which checks run,
and the rules that each check must meet; the content of `check.json`.
"""
