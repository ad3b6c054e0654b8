"""
The composition root: builds a replica from the settings.

It is the only package that names concrete back-ends. Each module builds one group of services;
`application.py` puts the groups together and runs them.
"""
