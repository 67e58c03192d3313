"""A small Qwen3 whose answers can be checked, the script that trained it, and its problems."""
