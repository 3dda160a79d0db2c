"""Files that hold named tensors: which of them a file is, and how each is read."""
