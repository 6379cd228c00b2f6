"""The command line. Thin: it asks the daemon and prints; nothing heavy is imported before it is needed."""
