"""Shows approvals: code in the sandbox asks, and a callback decides."""

from atoll import Answer, Approval, Atoll

CODE = """
from atoll_session import ask

def handler(files):
    answer = ask("May I delete these?", files)
    if not answer:
        return f"kept all: {answer.reason}"
    return f"deleted {answer.answer}"
"""


def decide(approval: Approval) -> Answer:
    print(approval.question, approval.data)
    removable = [name for name in approval.data if name.endswith(".tmp")]
    if not removable:
        return Answer(False, reason="these are needed")
    return Answer(True, removable)


with Atoll() as atoll, atoll.session() as session:
    for files in (["a.tmp", "report.txt"], ["report.txt"]):
        print(session.run(CODE, event=files, on_approval=decide).check().return_value)
