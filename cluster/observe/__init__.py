"""What operators see of a running cluster."""
