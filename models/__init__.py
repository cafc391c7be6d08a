"""nn.Module code: imports torch and timm, and nothing of this project."""
