"""Libraries that are compiled on the machine they run on."""
