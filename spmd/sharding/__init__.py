"""Sharding of tensors over workers: meshes, partition specs, marks, and layouts."""
