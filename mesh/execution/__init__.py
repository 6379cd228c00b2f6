"""Engines that run guests: one protocol, `engine.Engine`, and its implementations, held to one contract test suite."""
