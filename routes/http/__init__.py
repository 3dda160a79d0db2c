"""What all routes share: requests, errors, streams."""
