"""vLLM's offloading connector on a CPU.

`CPUOffloadingSpec` refuses to make a worker where there is no GPU, so tests give it one that copies the KV
between two pieces of host memory, at once. The scheduler's side, which decides what is stored, evicted and
restored, is vLLM's own.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """In this process."""
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    class HostWorker(OffloadingWorker):  # type: ignore[misc]
        def __init__(self, kv_caches: Any, chunks: int) -> None:
            self.device = [cache.tensor for cache in kv_caches.tensors]
            self.host = [tensor.new_zeros((chunks, *tensor.shape[1:])) for tensor in self.device]
            self.done: list[Any] = []

        def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            return self._copy(job_id, self.device, src_spec.block_ids, self.host, dst_spec.block_ids)

        def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            return self._copy(job_id, self.host, src_spec.block_ids, self.device, dst_spec.block_ids)

        def _copy(self, job_id: int, source: Any, reads: Any, target: Any, writes: Any) -> bool:
            assert len(reads) == len(writes), "one block per chunk"
            for one, other in zip(source, target, strict=True):
                for read, write in zip(reads.tolist(), writes.tolist(), strict=True):
                    other[write].copy_(one[read])
            self.done.append(TransferResult(job_id, success=True))
            return True

        def get_finished(self) -> list[Any]:
            done, self.done = self.done, []
            return done

        def wait(self, job_ids: set[int]) -> None:
            """Every copy is done when it is submitted."""

    def get_worker(self: Any, kv_caches: Any) -> HostWorker:
        assert self.num_chunks > 0, "cpu_bytes_to_use is too small for a chunk"
        if self._worker is None:
            self._worker = HostWorker(kv_caches, self.num_chunks)
        return self._worker

    CPUOffloadingSpec.get_worker = get_worker
