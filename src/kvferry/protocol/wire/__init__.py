"""What travels between peers, and what it says of them."""
