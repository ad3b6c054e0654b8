"""`python -m atoll.cli`."""

from atoll.cli import main

main()
