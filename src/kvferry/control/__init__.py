"""How endpoints find one another (HTTP), exchange messages (ZMQ), and know which processes have ended."""
