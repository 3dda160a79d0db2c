"""Evaluation of a served model in one command: `python -m rwkv_batch.evaluate`."""
