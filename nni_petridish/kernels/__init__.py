"""The numbers of plain PyTorch ops, computed faster on a CPU; everything works without them."""
