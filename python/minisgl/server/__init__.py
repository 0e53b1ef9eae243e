"""The HTTP server: protocol, routes, processes. Free of torch."""
