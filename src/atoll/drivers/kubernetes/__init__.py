"""
Instances as pods of a Kubernetes cluster. `driver.py` is the driver; `api.py` and `pod_watch.py`
are how it talks to the API server, and `pod_manifest.py` is what it asks for.
"""
