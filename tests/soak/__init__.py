"""Many clients, a small K/V pool, and every text compared with plain decoding: `python -m tests.soak`."""
