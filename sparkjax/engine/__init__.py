"""The serving engine: scheduler, caches, the jitted step, the sampler."""
