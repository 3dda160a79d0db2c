"""The log of requests that the engine has got, chained by hashes."""
