"""Translation, as the clients of many services ask for it."""
