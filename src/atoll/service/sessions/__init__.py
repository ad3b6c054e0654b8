"""
Sessions: their records, instances, connections and life cycle.

`service.py` has the verbs of the API. A verb records the wanted state of a session
(`wanted_state.py`); `transitions.py` takes the steps of `model/plan.py` until it is reached.
`start.py` connects to a session and starts it if necessary. Only this package writes the state of
sessions; what happens to them is published to observers (`observers.py`). Other packages get
`access.SessionAccess`; the classes of this one are built on `core.SessionCore`.
"""
