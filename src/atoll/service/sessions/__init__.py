"""
Sessions: their records, instances, connections and life cycle.

`service.py` has the verbs of the API. A verb records what a session should become (`lifecycle.py`);
`transitions.py` takes the steps of `model/plan.py` until it is so. `start.py` gives code a
connection to a session and starts the session if need be. Only this package writes the state of
sessions; what happens to them is published to observers (`observers.py`).
"""
