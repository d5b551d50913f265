"""What the demo asks, and the benchmark where it is given no prompts."""

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter to a friend who has just moved to another city.",
    "What should I take with me on a three-day walk in the mountains?",
    "Write a Python function that counts the vowels in a string.",
    "Tell me a short story about a lighthouse keeper and a lost ship.",
    "What is the difference between a river and a canal?",
    "Give me five ideas for a cheap birthday party.",
    "How does a refrigerator keep food cold?",
)
