"""The engine: scheduling, memory and the step loop, from sequences to token ids."""
