"""One model on one device behind one protocol: what the engine knows of a backend."""
