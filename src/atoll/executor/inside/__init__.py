"""
What user code may import and call in every sandbox. Drivers write it out
(`drivers/shared/executor_bundle.py`); nothing of Atoll imports it.
"""
