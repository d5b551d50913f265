"""What a server does with requests nobody should send, and with an engine that dies: always compared with plain vLLM."""
