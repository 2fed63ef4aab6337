"""Operations: one folder each, with a jnp reference, its implementations, and the real shapes."""
