"""The engine for MariaDB and PostgreSQL: connection pool, retries and error translation."""
