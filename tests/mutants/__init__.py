"""Deliberate bugs, and the tests that catch them."""
