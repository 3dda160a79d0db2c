"""/v1/files and /v1/batches: requests in files, which run when nothing else does."""
