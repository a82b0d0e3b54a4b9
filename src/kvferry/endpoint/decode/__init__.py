"""The decode side: asks prefill engines for requests' caches, and receives them."""
