"""Shows the shortest program: run code in a sandbox, without a server."""

from atoll import Atoll

with Atoll() as atoll, atoll.session() as session:
    print(session.run("print(6 * 7)").stdout)
