"""The page that a daemon shows its own user in a browser, on this machine only (docs/web.md)."""
