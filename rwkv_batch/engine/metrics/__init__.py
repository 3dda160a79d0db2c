"""What metrics are counted with, in plain numbers: the step loop touches nothing else of them."""
