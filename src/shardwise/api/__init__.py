"""What users call. Composes the layers below and holds no mechanism of its own."""
