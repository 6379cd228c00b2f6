"""`make test-machines`: whole machines of today's Debian under QEMU, with the wheel installed as a user installs it."""
