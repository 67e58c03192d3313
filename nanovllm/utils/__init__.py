"""What layers and engine share: step context, weight loading, ranks, tokenizer."""
