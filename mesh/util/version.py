"""The version of this release; pyproject.toml says the same."""

VERSION = "0.1.0"
