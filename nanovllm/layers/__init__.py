"""One module per op of the network, each with the torch reference as its CPU path."""
