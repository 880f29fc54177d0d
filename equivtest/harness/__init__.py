"""EleutherAI's evaluation harness around an engine; nothing outside this room imports it (package lm-eval)."""
