"""The HTTP server's own process: requests in and out, and watch over the other processes.

May import `params`, `config`, `message`, `tokenizer`, `utils` and `env`; free of torch. The engine
and the tokenizers run in processes of their own, which `launch` starts by name.
"""
