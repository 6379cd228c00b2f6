"""Bounds of adverts that settings and commands keep as well. They are apart: who reads settings needs no adverts."""

MAX_SLOTS = 1024  # of a node (own choice)
