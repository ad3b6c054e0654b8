"""
The store on SQLite, MariaDB or PostgreSQL.

The module of each noun holds plain SQL and asks the engine to run it. `sqlite` and `server` are the
two engines. Rows are mapped to entities by `mapper`, from `tables`.

SQLAlchemy and alembic describe and migrate the schema, and connect to servers. Importing them takes
longer than all else that a start does, so nothing that a start on SQLite needs imports them.
"""
