"""The version of all JSON that people's programs read: of the command line, and of the daemon's own socket."""

SCHEMA = 1  # fields are added under it; it grows when one changes its meaning or goes
