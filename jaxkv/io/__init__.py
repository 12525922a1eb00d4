"""Models on disk: Hugging Face folders, GGUF files, orbax checkpoints, and their tokenizers."""
