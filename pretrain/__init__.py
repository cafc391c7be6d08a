"""Stage one: masked-autoencoder pretraining."""

import training.openmp  # noqa: F401 (first of all: before torch)
