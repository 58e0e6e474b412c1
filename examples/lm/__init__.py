"""A small byte-level language model with MiniMax Sparse Attention: the parts of examples/train_lm.py."""
