"""From messages to a prompt; from what is written to thoughts, answer and calls. Knows no HTTP."""
