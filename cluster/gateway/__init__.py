"""The cluster's front door: validates, authenticates, tokenizes, has requests placed, and relays their tokens."""
