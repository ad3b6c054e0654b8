"""
Shows how to use a server. Start one with `atoll serve`, then run:

    ATOLL_URL=http://127.0.0.1:8000 python examples/server.py

The key comes from ATOLL_API_KEY or, for a server on this machine, from its data directory.
"""

import sys

from atoll import Atoll

with Atoll() as atoll:
    if atoll.url is None:
        sys.exit("Set ATOLL_URL to the URL of a server.")
    with atoll.session(timeout=60) as session:
        # Print output while the code runs.
        session.run(
            "for n in range(3): print('line', n)", on_stdout=lambda text: print(text, end="")
        )
        print(session.refresh().status)
    print(session.info.status)
