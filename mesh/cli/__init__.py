"""The command line: a thin client that prints the daemon's answers and imports heavy modules late."""
