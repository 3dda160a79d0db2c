"""What a step of a CUDA model is made of besides its layers: graphs, states, and the adapters of its rows."""
