"""`python -m mesh.cli`, the same as `mesh`."""

from mesh.cli.main import main

main()
