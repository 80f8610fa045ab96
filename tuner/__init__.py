"""Searching: which configurations are legal, how a candidate is compiled, verified, measured and recorded."""
