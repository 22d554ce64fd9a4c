"""The processes of one run: their ranks, how they connect, and how a failure ends all of them.

Decides: how launchers' variables are read, and how `bigtrain train -n N` starts ranks without a
launcher; rendezvous; mesh, backends and timeouts; CPU threads of a rank; exit statuses; when the
ranks restart, how often, and how many of them; signals that save and stop.
"""
