"""The decoder: weights declared once, layers, and one forward pass for prefill and decode."""
