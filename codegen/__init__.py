"""From a block specification and a configuration to CUDA source and to an importable module."""
