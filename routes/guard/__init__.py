"""What a client sends is made into requests that Robyn can read, before it reads them."""
