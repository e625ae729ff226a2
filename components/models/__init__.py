"""PyTorch definitions of the retriever and the rankers: tensors in, tensors out, no IO."""
