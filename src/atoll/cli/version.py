"""`atoll version`."""

import platform

from atoll.cli import output
from atoll.cli.options import Json
from atoll.version import __version__


def version(json: Json = False) -> None:
    """Print the version."""
    if json:
        output.as_json({"atoll": __version__, "python": platform.python_version()})
    else:
        output.line(f"atoll {__version__} (Python {platform.python_version()})")
