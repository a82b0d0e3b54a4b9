"""The prefill side: sends the caches of requests to whichever decode ranks ask for them."""
