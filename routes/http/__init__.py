"""HTTP without any route: requests, responses, passwords, errors, streams and the base of request bodies."""
