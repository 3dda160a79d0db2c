"""PostgreSQL itself: a connection that is made again when it is lost, the tables, and reading them."""
