"""Shows `handler`: pass an event to code, get its return value, and see an exception."""

from atoll import Atoll

CODE = """
def handler(event):
    print("working")
    return {"message": "Hello", "input": event.get("name", "World")}
"""

with Atoll() as atoll, atoll.session() as session:
    result = session.run(CODE, event={"name": "Alice"}).check()
    print(result.return_value)
    print(result.stdout, end="")

    failed = session.run("def handler(event):\n    return 1 / 0\n")
    assert failed.error is not None
    print(failed.status, failed.exit_code, failed.error.name)
