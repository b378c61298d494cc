"""Speculation: how tokens are drafted, and how drafts are verified without changing the output."""
