"""The benchmark: contestants in processes of their own, measured in turn on the same prompts."""
