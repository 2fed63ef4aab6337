"""Text: tokenizers, chat templates, incremental detokenization, stop strings."""
