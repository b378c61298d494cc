"""The cluster's durable picture in Redis: hints that may be wrong or gone at any time without changing a token."""
