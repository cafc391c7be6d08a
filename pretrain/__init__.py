"""Stage one: masked-autoencoder pretraining."""
