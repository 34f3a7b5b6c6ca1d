"""Weights in the folders of the Hugging Face libraries: GPT-2, Llama, Mistral, Qwen 2; read and written by any mesh."""

from hpcpar.models.pretrained.loading import load_pretrained
from hpcpar.models.pretrained.saving import save_pretrained

__all__ = ["load_pretrained", "save_pretrained"]
