"""One module per endpoint: parse, run, answer. May import the server's modules."""
