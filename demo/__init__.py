"""The files of the bundled model, and what trains it. See README.md."""
