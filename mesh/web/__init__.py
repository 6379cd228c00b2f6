"""The page that a daemon shows its own user in a browser, on this machine only (docs/explanation/views.md)."""
