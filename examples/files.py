"""Shows files: upload a file, run code on it, and download the files that the code created."""

import tempfile
from pathlib import Path

from atoll import Atoll

CODE = """
import csv

with open("in/sales.csv") as file:
    rows = list(csv.DictReader(file))
with open("report.txt", "w") as file:
    file.write(f"{len(rows)} rows, {sum(int(row['amount']) for row in rows)} in all\\n")
"""

with tempfile.TemporaryDirectory() as directory, Atoll() as atoll, atoll.session() as session:
    local = Path(directory)
    (local / "sales.csv").write_text("item,amount\ntea,3\ncake,4\n")
    session.files.upload(local / "sales.csv", "in/sales.csv")

    result = session.run(CODE).check()
    print("artifacts:", *result.artifacts)

    for path in result.artifacts:
        print(session.files.download(path, local).read_text(), end="")
