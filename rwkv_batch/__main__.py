"""`python -m rwkv_batch`: the version, or where to start."""

import argparse

from rwkv_batch import __version__

parser = argparse.ArgumentParser(prog="python -m rwkv_batch", description="RWKV-7 inference.")
parser.add_argument("--version", action="version", version=f"rwkv-batch {__version__}")
parser.parse_args()
print("To start the server, run: python app.py --model-path P (python app.py --help lists every flag)")
