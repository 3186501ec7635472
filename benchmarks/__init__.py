"""Measurements. Each file is one command; `python -m benchmarks.all` runs them and prints the table."""
