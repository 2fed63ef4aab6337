"""Devices, meshes, sharding rules and collectives."""
