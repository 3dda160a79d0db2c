"""Where states are of sessions in a database that servers share."""
