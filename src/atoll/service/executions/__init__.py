"""
Executions: submitted, run, recorded and streamed.

`service.py` has the verbs of the API. `submit.py` records an execution, `runner.py` drives it as a
`Run` (`run.py`) from its slot to its result, `attempt.py` makes each attempt, and `commit.py`
stores the result. The package `sessions` does not import this one.
"""
