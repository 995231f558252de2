from vllm_ext.cache.reuse.order import ReuseOrder

__all__ = ["ReuseOrder"]
