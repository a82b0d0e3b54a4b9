"""One transfer: the state machines of both sides, and the credits of staging memory."""
