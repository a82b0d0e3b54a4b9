"""How endpoints find and talk to one another: the registry (HTTP) and the channel between peers."""
