"""A sandbox in three lines, with no server."""

from atoll import Atoll

with Atoll() as atoll, atoll.session() as session:
    print(session.run("print(6 * 7)").stdout)
