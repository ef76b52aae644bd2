"""Architectures: Hugging Face loading, the tiny from-scratch Llama, LoRA."""
