"""A model's weights as the kernels take them."""
