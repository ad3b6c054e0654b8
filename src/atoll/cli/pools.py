"""`atoll pools`."""

from atoll.cli import output
from atoll.cli.options import ApiKey, Json, Url, connect


def pools(url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """List the warm pools of the server."""
    with connect(url, api_key) as atoll:
        found = list(atoll.pools.list())
    if json:
        output.as_json(found)
        return
    output.table(
        ("TEMPLATE", "READY", "STARTING", "TARGET", "BOUNDS", "RATE", "START", "HITS", "LIMIT"),
        [
            (
                pool.template_id,
                pool.ready,
                pool.starting,
                pool.target,
                f"{pool.minimum}-{pool.maximum}",
                f"{pool.rate_per_minute:.1f}/min",
                "-" if pool.start_seconds is None else f"{pool.start_seconds * 1000:.0f} ms",
                f"{pool.hits}/{pool.hits + pool.misses}",
                pool.message or pool.limited_by or "",
            )
            for pool in found
        ],
    )
