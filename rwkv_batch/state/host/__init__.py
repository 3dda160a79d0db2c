"""One database for all engines of a host: a process that writes, and what engines have in place of a file."""
