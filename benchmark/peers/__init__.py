"""minisgl beside llama.cpp, ik_llama.cpp, OpenVINO GenAI and vLLM on one machine, in one run.

`python -m benchmark.peers` installs the others, each in an environment of its own, and measures all
in turns. `run` leads; `works` says what is measured; `table` computes and shows; `worker_*` are
scripts that each engine's own Python runs, speaking `protocol`; `quality` compares answers.
"""
