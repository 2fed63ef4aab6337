"""sparkjax: large language models on NVIDIA DGX Spark, served and studied from pure JAX."""

__version__ = "0.1.0"
