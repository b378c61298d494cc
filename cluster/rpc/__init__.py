"""What goes over the wire: conversions, error statuses, the worker's service and a small client."""
