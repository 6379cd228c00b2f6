"""`python -m mesh.cli`, the same as `mesh`."""

from mesh.cli.entry import main

main()
