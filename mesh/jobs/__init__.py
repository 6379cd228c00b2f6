"""A job's life: one replicated ledger per job, kept by a witness group and moved on by whoever holds the term.

Cores (no I/O): `spec`, `ledger`, `messages`, `witness`, `proposer`, `steward`, `runner`, `contract`.
Shells: `journal` (SQLite), `attempt` (the guest and its directories), `couriers` (checkpoint transfer), `service` (wires them).
"""
