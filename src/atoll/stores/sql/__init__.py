"""
The store on a SQL database; today that is SQLite.

`engine` and `writer` know SQLite. The modules of the nouns hold plain SQL and only ask the engine
to run an operation: a function of a connection, short, free of side effects beyond the database and
safe to run twice, because a transaction that failed is run again.

SQLAlchemy and alembic describe and migrate the schema. Nothing else imports them: loading them
takes longer than everything else that a start does.
"""
