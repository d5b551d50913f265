"""The only package that imports vllm. `ledger.py` lists every touch."""
