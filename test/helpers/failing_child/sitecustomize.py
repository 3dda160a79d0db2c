"""Is imported by each Python process that starts with this folder on PYTHONPATH; see inside_faults.py."""

import os

if path := os.environ.get("RWKV_TEST_FAULTS"):
    import failing_calls

    failing_calls.install(path)
