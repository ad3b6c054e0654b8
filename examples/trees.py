"""Shows directories: upload one, run code on it, search it, and download it."""

import tempfile
from pathlib import Path

from atoll import Atoll

CODE = """
from pathlib import Path

for path in Path("project").glob("*.txt"):
    path.with_suffix(".upper").write_text(path.read_text().upper())
"""

with tempfile.TemporaryDirectory() as directory, Atoll() as atoll, atoll.session() as session:
    local = Path(directory)
    (local / "in").mkdir()
    for number in range(3):
        (local / "in" / f"{number}.txt").write_text(f"this is {number}\n")

    sent: list[int] = []
    tree = session.files.upload_tree(
        local / "in", "project", progress=lambda size, total: sent.append(size)
    )
    print(f"{tree.files} files, {sent[-1]} bytes")

    session.run(CODE).check()
    for match in session.files.search("THIS", glob="**/*.upper"):
        print(match.path, match.line, match.text)

    session.files.download_tree("project", local / "out")
    print(*sorted(path.name for path in (local / "out").iterdir()))
