"""llama.cpp's own server, out of the wheel `xllamacpp`, until standard input ends.

Run by path, with a Python that has xllamacpp; that need not be the one skippy is installed in:

    python -P bench/llamacpp_server.py MODEL --threads 2 --lanes 8 --context 1024

Prints the base URL when the model is loaded. The server's settings are its defaults, but for its caches of
earlier prompts, which are off unless `--cache` is given: most figures are of requests that no cache helps.
"""

from __future__ import annotations

import argparse
import sys

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("threads", "lanes", "context"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--cache", action="store_true")
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.n_parallel = args.lanes
    params.n_ctx = args.lanes * args.context  # which the server divides among its slots
    params.cont_batching = True
    if not args.cache:
        params.cache_prompt = params.cache_idle_slots = False
        params.cache_ram_mib = params.n_ctx_checkpoints = params.n_cache_reuse = 0
    params.fit_params = False  # would change the context to what it thinks fits
    params.ui = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
