"""How a guest runs: one protocol, `engine.Engine`, and its implementations. Rows of one contract test suite."""
