"""The processes of one run: who each is, how they connect, how one failure ends all of them.

Launchers' variables, and `bigtrain train -n N` without a launcher; rendezvous; mesh, backends and
timeouts; CPU threads of a rank; exit statuses; when ranks begin anew, and how many; signals that
save and stop.
"""
