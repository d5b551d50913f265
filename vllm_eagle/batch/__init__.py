"""Answer a file of prompts: every row once, in order, through any number of interruptions."""
