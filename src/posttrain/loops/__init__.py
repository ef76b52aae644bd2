"""Thin loops: supervised, preference, policy gradient. The loop people read is the loop that runs."""
