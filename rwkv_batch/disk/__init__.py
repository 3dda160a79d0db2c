"""What has to survive a crash or a power failure."""
