"""The retention adapter: vLLM's block pool, with our free list in place of its LRU list.

Reading order: `engine` (one engine's state), `requests` (a vLLM request -> plain values), `block_queue`
(vLLM's free queue interface over `FreeBlocks`), `managers` (who owns what, who departs), `scheduler`
(installs it).
"""
