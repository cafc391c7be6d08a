"""Stage two: what an encoder knows, asked with labels."""
