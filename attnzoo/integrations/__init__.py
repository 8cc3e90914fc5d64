"""attnzoo inside other libraries: `transformers` models, and code written for torch's SDPA."""
