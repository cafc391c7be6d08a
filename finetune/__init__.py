"""Stage two: what an encoder knows, asked with labels."""

import training.openmp  # noqa: F401 (first of all: before torch)
