"""Files, images and batches: everything between the disk and the model's input."""
