"""What is measured at the first contact, a program each. All run on a CPU as well: `--device cpu --tiny`."""
