"""The demo: a real chat model answers a few prompts with plain vLLM and with trees."""
