"""Where a request should run: pure decisions over what each worker holds and how busy it is. No Ray, Redis or gRPC."""
