"""Side-by-side measurements; each prints a ratio from one run."""
