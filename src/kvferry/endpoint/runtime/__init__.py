"""What both sides run on: threads, run queues, workers and timers, and this machine as a platform."""
