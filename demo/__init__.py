"""The bundled demo model: a small RWKV-7 trained on text that this package makes. See README.md."""
