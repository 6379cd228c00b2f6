"""Jobs of one node: the shells around the cores of `mesh.consensus`.

`service` performs effects, `input_queue` feeds the cores, `attempt` runs a guest, `submission_retry` brings jobs to witnesses,
`job_table`, `own_status` and `status_gossip` know and publish status, `archive` keeps finished jobs out of memory.
"""
