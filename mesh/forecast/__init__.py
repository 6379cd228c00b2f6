"""Trying the survival estimate against others on traces: `mesh survive eval`. Nothing here runs in the daemon."""
