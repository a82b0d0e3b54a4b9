"""Real engines, disaggregated, on one machine: which processes, who watches them, and the address in front of them."""
