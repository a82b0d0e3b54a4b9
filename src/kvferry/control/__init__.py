"""How endpoints find one another and exchange messages: the registry (HTTP) and the channel between peers."""
