"""Exit codes of every command.

OK: done, also where a built-in choice stays or the time of a tuning run is over. FAILED: something was found wrong, or
does not work: a package that is missing, a server that does not start, a table that is stale, two tables that differ.
USAGE: an argument, or what it names, cannot be used. INTERRUPTED: by Ctrl-C, SIGTERM or SIGHUP.
"""

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
