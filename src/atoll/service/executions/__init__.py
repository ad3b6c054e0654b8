"""
Executions: submitted, run, recorded and streamed.

`service.py` has the verbs of the API. `submit.py` records an execution, `runner.py` drives it as a
`Run` (`run.py`) from its slot to its stored result, and `attempt.py` makes each attempt. Sessions
know nothing of executions.
"""
