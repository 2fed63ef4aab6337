"""HTTP: the OpenAI API over the engine."""
