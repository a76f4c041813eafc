"""Llama-like models on the CPU as one compiled function: packed weights, and rows that do not depend on each other."""
