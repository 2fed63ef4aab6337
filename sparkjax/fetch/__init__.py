"""Fetching checkpoints: from the Hugging Face hub, or from another box that has them."""
