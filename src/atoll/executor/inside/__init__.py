"""
What user code may import and call in every sandbox. Drivers write it out (`drivers/bundle.py`);
nothing of Atoll imports it.
"""
