"""Hostile members, neighbours, guests and lenders: reusable actors, and the cases that they play against real daemons."""
