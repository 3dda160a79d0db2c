"""Where states of sessions live: slots, host memory, database."""
