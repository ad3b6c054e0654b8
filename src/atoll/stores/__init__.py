"""What Atoll remembers. Every back-end keeps the contract of `base`."""
