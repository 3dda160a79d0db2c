"""Files of requests and the batches that run them, in one folder. Nothing about HTTP or the engine."""
