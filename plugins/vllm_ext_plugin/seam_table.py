"""The rows of the table of seams: what we touch in vLLM, why, how, and what happens when it is missing.

Line numbers are vLLM 0.32's. To add a row: write it here, run `tools/fingerprint.py` (see there) for the
supported versions, and say in `differs` what the code does where the versions disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ALL_VERSIONS = ("0.31", "0.32", "0.33")

How = Literal["wrap", "call", "subclass", "implement", "set attribute", "read"]

REFUSED = "vllm_ext refuses to start"
NO_RETENTION = "vllm_ext refuses to start under a policy with a retention section"
NO_OFFLOAD = "vllm_ext refuses to start with CPU offload under a policy with a retention section"
NO_TRACE = "vllm_ext refuses to start under a policy with a block trace"
FEATURES = {NO_RETENTION: "retention", NO_OFFLOAD: "offload", NO_TRACE: "block_trace"}


@dataclass(frozen=True)
class Seam:
    """One symbol of vLLM."""

    module: str
    qualname: str  # `Class.name` also for attributes that only instances have
    how: How
    why: str
    when_missing: str
    upstream: str = ""  # file:line in vLLM 0.32, or an issue or pull request
    fatal: bool = False  # going on without it would break a promise, so the start is refused
    calls: tuple[str, ...] = ()  # calls in the function's body that we count on, in this order
    versions: tuple[str, ...] = ALL_VERSIONS  # where it exists at all
    differs: str = ""  # how the code copes where the versions' signatures differ

    @property
    def feature(self) -> str | None:
        """The part of the policy that cannot do without it, where it is not all of it."""
        return FEATURES.get(self.when_missing)

    @property
    def id(self) -> str:
        return f"{self.module}.{self.qualname}"


def _row(
    symbol: str, how: How, why: str, when_missing: str, upstream: str = "", **details: object
) -> tuple[Seam, ...]:
    """`module:qualname`; several qualnames of one class as `module:Class.{a,b}`."""
    module, _, qualname = symbol.partition(":")
    owner, brace, names = qualname.partition("{")
    qualnames = [owner + name.strip() for name in names.rstrip("}").split(",")] if brace else [qualname]
    fatal = when_missing == REFUSED
    return tuple(Seam(module, name, how, why, when_missing, upstream, fatal, **details) for name in qualnames)  # type: ignore[arg-type]


# fmt: off
_ACTIVATION = (
    *_row("vllm.plugins:load_general_plugins", "read", "loads us once in every process, with no arguments",
          REFUSED, "plugins/__init__.py:77", calls=("load_plugins_by_group",)),
    *_row("vllm.plugins:load_plugins_by_group", "read",
          "loads all plugins unless VLLM_PLUGINS names some; swallows load errors", REFUSED,
          "plugins/__init__.py:32"),
    *_row("vllm.envs:VLLM_PLUGINS", "set attribute",
          "`--plugins` sets this variable, so that child processes inherit it", REFUSED, "envs.py:117"),
    *_row("vllm.envs:environment_variables", "set attribute",
          "declares VLLM_EXT_* to the check of unknown variables",
          "--fail-on-environ-validation refuses our variables", "envs.py:617"),
    *_row("vllm.envs:VLLM_USE_RUST_FRONTEND", "read",
          "the Rust front end bypasses Python middleware: refused with tenancy",
          "the Rust front end is not recognised", "envs.py:170"),
    *_row("vllm.engine.arg_utils:EngineArgs.add_cli_args", "wrap", "adds --plugins and --policy",
          "the two options are missing; VLLM_PLUGINS and VLLM_EXT_POLICY still work",
          "engine/arg_utils.py:920"),
    *_row("vllm.engine.arg_utils:AsyncEngineArgs.add_cli_args", "read",
          "loads plugins before it builds the options of EngineArgs",
          "the two options come too late for the command line", "engine/arg_utils.py:3196",
          calls=("load_general_plugins", "EngineArgs.add_cli_args")),
    *_row("vllm.engine.arg_utils:EngineArgs.create_engine_config", "wrap",
          "puts our scheduler in; refuses what undoes the policy", REFUSED, "engine/arg_utils.py:2205"),
    *_row("vllm.engine.arg_utils:EngineArgs.scheduler_cls", "read",
          "a scheduler that the user chose becomes the base of ours", REFUSED, "engine/arg_utils.py:750"),
    *_row("vllm:__version__", "read", "part of the model identity in every salt", REFUSED, "__init__.py:7"),
)

_CONFIG = (
    *_row("vllm.config.vllm:VllmConfig.{model_config,cache_config,scheduler_config,parallel_config}", "read",
          "model identity, start refusals", REFUSED, "config/vllm.py:348"),
    *_row("vllm.config.vllm:VllmConfig.{kv_transfer_config,speculative_config,lora_config}", "read",
          "refuses what carries KV or drafts past the salt", REFUSED, "config/vllm.py:374"),
    *_row("vllm.config.model:ModelConfig.{model,revision,tokenizer,tokenizer_revision,dtype,quantization}",
          "read", "the model identity in every salt", REFUSED, "config/model.py:154"),
    *_row("vllm.config.cache:CacheConfig.{cache_dtype,prefix_caching_hash_algo,enable_prefix_caching}",
          "read", "model identity; xxhash is refused with tenancy", REFUSED, "config/cache.py:122",
          differs="cache_dtype may be any string since 0.33: it enters the salt as text in all versions"),
    *_row("vllm.config.lora:LoRAConfig.{max_lora_rank,lora_dtype}", "read",
          "the model identity where LoRA is on", REFUSED, "config/lora.py:33"),
    *_row("vllm.config.kv_transfer:KVTransferConfig.{kv_connector,kv_connector_extra_config}", "read",
          "connectors that ignore the salt are refused", REFUSED, "config/kv_transfer.py"),
    *_row("vllm.config.speculative:SpeculativeConfig.method", "read",
          "`suffix` drafts across tenants and is refused", REFUSED, "config/speculative.py:399"),
    *_row("vllm.config.parallel:ParallelConfig.{data_parallel_size,data_parallel_size_local,nnodes}", "read",
          "several nodes need a shared salt secret", REFUSED, "config/parallel.py:146"),
    *_row("vllm.config.scheduler:SchedulerConfig.{scheduler_cls,async_scheduling}", "set attribute",
          "points at our scheduler factory; tells which base it extends", REFUSED, "config/scheduler.py:177"),
    *_row("vllm.config.scheduler:SchedulerConfig.get_scheduler_cls", "read",
          "returns what scheduler_cls names, a factory included", REFUSED, "config/scheduler.py:228",
          calls=("resolve_obj_by_qualname",)),
    *_row("vllm.utils.import_utils:resolve_obj_by_qualname", "call",
          "imports the scheduler that the user chose",
          "a --scheduler-cls of the user's own cannot be extended", "utils/import_utils.py:119"),
)

_FRONT_END = (
    *_row(""
          "vllm.plugins.endpoint_plugins.interface:EndpointPlugin.{name,required_tasks,attach_router,init_state}",
          "implement", "identity middleware and our routes", REFUSED,
          "plugins/endpoint_plugins/interface.py:51"),
    *_row("vllm.entrypoints.launchers.app:build_app", "read",
          "our middleware is added before vLLM's, so it sits inside its authentication and sees every route",
          REFUSED, "entrypoints/launchers/app.py:51",
          calls=("attach_endpoint_plugins", "init_entrypoints_middleware")),
    *_row("vllm.v1.engine.output_processor:OutputProcessor.add_request", "wrap",
          "stamps every request of every front end", REFUSED, "v1/engine/output_processor.py:616"),
    *_row("vllm.v1.engine.output_processor:OutputProcessor.__init__", "wrap",
          "ties a front end to the policy of its engine", REFUSED, "v1/engine/output_processor.py:507"),
    *_row("vllm.exceptions:VLLMValidationError", "subclass", "a refused caller gets a 4xx with the reason",
          REFUSED, "exceptions.py:28"),
    *_row("vllm.v1.engine.output_processor:OutputProcessor.{_finish_request,abort_requests}", "wrap",
          "per-tenant token counts", "metrics of prompt and reused tokens are off",
          "v1/engine/output_processor.py:855"),
    *_row("vllm.v1.engine.output_processor:OutputProcessor.{request_states,external_req_ids}", "read",
          "per-tenant token counts", "metrics of prompt and reused tokens are off",
          "v1/engine/output_processor.py:519"),
    *_row("vllm.v1.engine.output_processor:RequestState", "set attribute",
          "carries the identity to the token counts", "metrics of prompt and reused tokens are off",
          "v1/engine/output_processor.py:136"),
    *_row(""
          "vllm.v1.engine.output_processor:RequestState.{request_id,prompt_len,num_cached_tokens,is_prefilling}",
          "read", "per-tenant token counts", "metrics of prompt and reused tokens are off",
          "v1/engine/output_processor.py:160"),
    *_row(""
          "vllm.v1.engine:EngineCoreRequest.{request_id,cache_salt,sampling_params,pooling_params,mm_features,external_req_id}",
          "set attribute", "carries salt and stamp to the engine", REFUSED, "v1/engine/__init__.py:107"),
    *_row("vllm.sampling_params:SamplingParams.extra_args", "set attribute",
          "carries the stamp of generation requests", REFUSED, "sampling_params.py:412"),
    *_row("vllm.pooling_params:PoolingParams.extra_kwargs", "set attribute",
          "carries the stamp of pooling requests", REFUSED, "pooling_params.py:72"),
    *_row("vllm.v1.engine.async_llm:AsyncLLM.engine_core", "read",
          "asks the engine process (policy reload, counters)", "reload and engine metrics are off",
          "v1/engine/async_llm.py:184"),
    *_row("vllm.v1.engine.core_client:AsyncMPClient.call_utility_all_async", "call",
          "asks every engine process (policy reload, counters)", "only the first engine is asked",
          "v1/engine/core_client.py:1262", versions=("0.32", "0.33"),
          differs="0.31 has call_utility_async alone, which is used there"),
    *_row("vllm.v1.engine.core_client:AsyncMPClient.call_utility_async", "call",
          "asks the engine process where the row above is missing", "reload and engine metrics are off",
          "v1/engine/core_client.py:1259"),
    *_row("vllm.v1.engine.core_client:AsyncMPClient.client_index", "read",
          "of several API servers one counts the engine", "engine metrics are off",
          "v1/engine/core_client.py:1130"),
    *_row("vllm.v1.engine.core_client:InprocClient.engine_core", "read", "the engine of an in-process LLM",
          "reload of an in-process engine is off", "v1/engine/core_client.py:373"),
)

_ENGINE = (
    *_row("vllm.v1.engine.core:EngineCore", "set attribute", "gains the utility method `vllm_ext_call`",
          "reload and engine metrics are off", "v1/engine/core.py:113"),
    *_row("vllm.v1.engine.core:EngineCoreProc._handle_client_request", "read",
          "looks a utility method up by name", "reload and engine metrics are off", "v1/engine/core.py:1677",
          calls=("getattr", "self._invoke_utility_method")),
    *_row("vllm.v1.engine.core:EngineCore.__init__", "read",
          "loads plugins before it builds the scheduler, with keywords", REFUSED, "v1/engine/core.py:117",
          calls=("load_general_plugins", "vllm_config.scheduler_config.get_scheduler_cls", "Scheduler",
           "get_request_block_hasher")),
    *_row("vllm.v1.core.sched.scheduler:Scheduler", "subclass",
          "salts every request before its blocks are looked up", REFUSED, "v1/core/sched/scheduler.py:84"),
    *_row("vllm.v1.core.sched.scheduler:Scheduler.{__init__,add_request}", "subclass",
          "salts every request before its blocks are looked up", REFUSED, "v1/core/sched/scheduler.py:2616"),
    *_row("vllm.v1.core.sched.scheduler:Scheduler.shutdown", "subclass", "stops watching the policy file",
          "the watcher ends with the process", "v1/core/sched/scheduler.py:2980"),
    *_row("vllm.v1.core.sched.async_scheduler:AsyncScheduler", "subclass",
          "the base where async scheduling is on", REFUSED, "v1/core/sched/async_scheduler.py:14"),
    *_row("vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request", "read",
          "a request that waits for a grammar is never scheduled: the way to refuse one", REFUSED,
          "v1/core/sched/scheduler.py:3175"),
    *_row("vllm.v1.core.sched.scheduler:Scheduler.grammar_compile_error_reqs", "set attribute",
          "refuses a request", REFUSED, "v1/core/sched/scheduler.py:252",
          differs="a set of request ids up to 0.32, a dict to RequestError in 0.33: told apart by type"),
    *_row("vllm.outputs:RequestError.{code,message}", "call", "the reason of a refused request",
          "refused requests get no reason", "outputs.py", versions=("0.32", "0.33"),
          differs="not in 0.31, where a refusal carries no reason"),
    *_row("vllm.v1.request:RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "read",
          "parks a refused request", REFUSED, "v1/request.py:374"),
    *_row("vllm.v1.request:Request", "set attribute",
          "carries the identity and where the private part begins", REFUSED, "v1/request.py:60"),
    *_row(""
          "vllm.v1.request:Request.{cache_salt,block_hashes,mm_features,_block_hasher,status,structured_output_request}",
          "set attribute", "salts the request's blocks, isolates it when that fails, refuses it", REFUSED,
          "v1/request.py:230"),
    *_row(""
          "vllm.v1.request:Request.{request_id,prompt_token_ids,prompt_embeds,sampling_params,pooling_params,lora_request}",
          "read", "verifies the stamp; finds a shared prefix", REFUSED, "v1/request.py:60"),
    *_row("vllm.v1.request:Request.update_block_hashes", "call", "hashes the blocks anew under the salt",
          REFUSED, "v1/request.py:322"),
    *_row("vllm.multimodal.inputs:MultiModalFeatureSpec.{identifier,mm_position}", "set attribute",
          "encoder outputs are shared by identifier: makes it the trust domain's own", REFUSED,
          "multimodal/inputs.py:344"),
    *_row("vllm.multimodal.inputs:PlaceholderRange.offset", "read",
          "a shared prefix ends before the first image", REFUSED, "multimodal/inputs.py"),
    *_row("vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys", "wrap",
          "a second salt where the shared prefix ends", REFUSED, "v1/core/kv_cache_utils.py:625"),
    *_row("vllm.v1.core.kv_cache_utils:get_request_block_hasher", "read",
          "hashes through generate_block_hash_extra_keys, looked up when called", REFUSED,
          "v1/core/kv_cache_utils.py:941", calls=("generate_block_hash_extra_keys",),
          differs="0.33 may let a block's hash cover tokens after the block (look-ahead for a drafter): the "
          "window that the wrapper sees then ends later, so a block at the end of a shared prefix counts as "
          "private"),
    *_row("vllm.v1.core.block_pool:generate_block_hash_extra_keys", "wrap",
          "imported by name: KV events carry the same keys", REFUSED, "v1/core/block_pool.py:22"),
    *_row("vllm.v1.simple_kv_offload.manager:generate_block_hash_extra_keys", "wrap",
          "imported by name: KV events carry the same keys", REFUSED, "v1/simple_kv_offload/manager.py:30"),
    *_row("vllm.tokenizers:cached_tokenizer_from_config", "read", "re-exports the function below",
          "registered shared prefixes are refused", "tokenizers/__init__.py:9"),
    *_row("vllm.tokenizers.registry:cached_tokenizer_from_config", "call",
          "the engine's tokenizer, for shared prefixes", "registered shared prefixes are refused",
          "tokenizers/registry.py:285"),
    *_row("vllm.tokenizers.protocol:TokenizerLike.{encode,apply_chat_template}", "call",
          "tokens of a registered shared prefix", "registered shared prefixes are refused",
          "tokenizers/protocol.py:100"),
)

_RETENTION = (
    *_row("vllm.v1.core.sched.scheduler:Scheduler.kv_cache_manager", "read", "what retention extends",
          NO_RETENTION, "v1/core/sched/scheduler.py:328"),
    *_row("vllm.v1.core.kv_cache_manager:KVCacheManager", "subclass", "says for whom the block pool works",
          NO_RETENTION, "v1/core/kv_cache_manager.py:131"),
    *_row("vllm.v1.core.kv_cache_manager:KVCacheManager.{allocate_slots,free,pop_blocks_for_free}",
          "subclass", "says for whom the block pool works; hits by tier", NO_RETENTION,
          "v1/core/kv_cache_manager.py:371",
          differs="0.31 has no skip_zeroing_group_ids: what follows num_external_computed_tokens is passed "
          "on as it comes"),
    *_row("vllm.v1.core.kv_cache_manager:KVCacheManager.{block_pool,coordinator,kv_cache_config}", "read",
          "the pool; its block sizes; bytes of a block", NO_RETENTION, "v1/core/kv_cache_manager.py:197"),
    *_row("vllm.v1.core.kv_cache_manager:KVCacheBlocks.blocks", "read", "the hits of a request", NO_RETENTION,
          "v1/core/kv_cache_manager.py:41"),
    *_row("vllm.v1.core.sched.scheduler:Scheduler._free_request_blocks", "read",
          "gives blocks back through one of the two", NO_RETENTION, "v1/core/sched/scheduler.py:2766",
          calls=("self.kv_cache_manager.free", "self.kv_cache_manager.pop_blocks_for_free")),
    *_row("vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.single_type_managers", "read",
          "are there several KV cache groups; the block size", NO_RETENTION,
          "v1/core/kv_cache_coordinator.py:157"),
    *_row("vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.block_size", "read",
          "tokens per block", NO_RETENTION, "v1/core/single_type_kv_cache_manager.py:108"),
    *_row("vllm.v1.core.block_pool:BlockPool", "subclass", "hears what is cached, used and given back",
          NO_RETENTION, "v1/core/block_pool.py:136"),
    *_row(""
          "vllm.v1.core.block_pool:BlockPool.{cache_full_blocks,cache_partial_block,move_block_hashes,touch,free_blocks,evict_blocks,reset_prefix_cache}",
          "subclass", "hears what is cached, used and given back", NO_RETENTION,
          "v1/core/block_pool.py:226"),
    *_row("vllm.v1.core.block_pool:BlockPool.free_block_queue", "set attribute",
          "our free list takes its place", NO_RETENTION, "v1/core/block_pool.py:178"),
    *_row("vllm.v1.core.block_pool:BlockPool.{blocks,null_block}", "read", "blocks by id", NO_RETENTION,
          "v1/core/block_pool.py:172"),
    *_row("vllm.v1.core.block_pool:BlockPool.get_new_blocks", "read",
          "takes victims from the queue, and tells of each that was cached", NO_RETENTION,
          "v1/core/block_pool.py:666",
          calls=("self.free_block_queue.popleft_n", "self._maybe_evict_cached_block")),
    *_row(""
          "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.{popleft,popleft_n,remove,append,append_n,prepend_n,get_all_free_blocks,num_free_blocks}",
          "implement", "our free list behind vLLM's interface; stock again after a fault of ours",
          NO_RETENTION, "v1/core/kv_cache_utils.py:299"),
    *_row("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue", "call",
          "stock LRU again after a fault of ours", NO_RETENTION, "v1/core/kv_cache_utils.py:299"),
    *_row("vllm.v1.core.kv_cache_utils:KVCacheBlock.{block_id,ref_cnt,is_null,block_hash}", "read",
          "which block; is it in use; what it caches", NO_RETENTION, "v1/core/kv_cache_utils.py:180"),
    *_row("vllm.v1.core.kv_cache_utils:make_block_hash_with_group_id", "call",
          "the key under which the pool caches a block", NO_RETENTION, "v1/core/kv_cache_utils.py:74"),
    *_row("vllm.v1.kv_cache_interface:KVCacheConfig.{num_blocks,kv_cache_tensors}", "read",
          "bytes of a block, for metrics", NO_RETENTION, "v1/kv_cache_interface.py:1463"),
    *_row("vllm.v1.kv_cache_interface:KVCacheTensor.size", "read", "bytes of a block, for metrics",
          NO_RETENTION, "v1/kv_cache_interface.py:1424"),
    *_row("vllm.v1.request:Request.{num_prompt_tokens,output_token_ids,session_id,kv_hints}", "read",
          "classes of the prompt's blocks; what the reuse order learns from", NO_RETENTION,
          "v1/request.py:143"),
    *_row("vllm.v1.request:RequestStatus.{FINISHED_STOPPED,FINISHED_LENGTH_CAPPED}", "read",
          "why a request stopped", NO_RETENTION, "v1/request.py:381"),
    *_row("vllm.v1.kv_hints.protocol:KvHintsEnvelope.actions", "read", "clients' wishes in Python",
          NO_RETENTION, "v1/kv_hints/protocol.py:26"),
    *_row("vllm.v1.kv_hints.protocol:KvHintAction.{action_type,action_version,payload}", "read",
          "clients' wishes in Python", NO_RETENTION, "v1/kv_hints/protocol.py:13"),
    *_row("vllm.lora.request:LoRARequest.lora_name", "read", "rules by adapter", NO_RETENTION,
          "lora/request.py:24"),
    *_row("vllm.config.model:ModelConfig.served_model_name", "read", "rules by model", NO_RETENTION,
          "config/model.py:325"),
    *_row("vllm.tokenizers.protocol:TokenizerLike.get_vocab", "call", "the tokens that begin a tool call",
          NO_RETENTION, "tokenizers/protocol.py:85"),
    *_row("vllm.v1.kv_offload.cpu.policies.factory:CachePolicyFactory.register_cache_policy", "call",
          "our eviction policy of the CPU offload tier", NO_OFFLOAD,
          "v1/kv_offload/cpu/policies/factory.py:25"),
    *_row("vllm.v1.kv_offload.cpu.policies.lru:LRUCachePolicy", "subclass",
          "our eviction policy of the CPU offload tier", NO_OFFLOAD, "v1/kv_offload/cpu/policies/lru.py:16"),
    *_row("vllm.v1.kv_offload.cpu.policies.base:order_request_keys", "call",
          "the tier's keys in the order of their tokens", NO_OFFLOAD,
          "v1/kv_offload/cpu/policies/base.py:10"),
    *_row("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:_create_req_context", "wrap",
          "says for which request the tier works", "the tier does not tell tenants apart",
          "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py:548"),
    *_row("vllm.v1.kv_offload.base:ReqContext.{set_state,get_state,get_offload_key_position}", "call",
          "says for which request the tier works, and where a key lies in it", NO_OFFLOAD,
          "v1/kv_offload/base.py:107"),
)

_OFFLOAD = (
    *_row(""
          "vllm.v1.kv_offload.cpu.policies.lru:LRUCachePolicy.{__init__,insert,remove,touch,on_request_finished,mark_evictable,mark_non_evictable,clear,evict}",
          "subclass", "LRU's books are kept, the victims are ours", NO_OFFLOAD,
          "v1/kv_offload/cpu/policies/lru.py:29",
          differs="insert gets the request's context since 0.33: passed on as it comes"),
    *_row("vllm.v1.kv_offload.cpu.policies.lru:LRUCachePolicy.{chunks,_ranks}", "read",
          "what is in the tier, and how recently it was used", NO_OFFLOAD,
          "v1/kv_offload/cpu/policies/lru.py:31", differs="a rank is a number up to 0.32, a pair since"),
    *_row("vllm.v1.kv_offload.cpu.policies.base:CachePolicy.{on_store_miss,cache_capacity}", "subclass",
          "for whom the next chunks are stored; how many there are", NO_OFFLOAD,
          "v1/kv_offload/cpu/policies/base.py:69"),
    *_row("vllm.v1.kv_offload.cpu.policies.base:ChunkStatus.ref_cnt", "read",
          "a chunk in use is never a victim", NO_OFFLOAD, "v1/kv_offload/cpu/policies/base.py:38"),
    *_row("vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager.prepare_store", "read",
          "tells of misses, asks for victims and stores, in this order", NO_OFFLOAD,
          "v1/kv_offload/cpu/manager.py:266",
          calls=("self._policy.on_store_miss", "self._policy.evict", "self._policy.insert")),
    *_row("vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec.eviction_policy", "read",
          "the name of the policy, from kv_connector_extra_config", NO_OFFLOAD,
          "v1/kv_offload/cpu/spec.py:134"),
)

_TRACE = (
    *_row("vllm.v1.core.sched.scheduler:Scheduler.schedule", "subclass",
          "a request's blocks have just been looked up", NO_TRACE, "v1/core/sched/scheduler.py:591"),
    *_row("vllm.v1.core.sched.scheduler:Scheduler._free_request", "subclass", "a request leaves", NO_TRACE,
          "v1/core/sched/scheduler.py:2714"),
    *_row("vllm.v1.core.sched.scheduler:Scheduler.requests", "read", "requests by id", NO_TRACE,
          "v1/core/sched/scheduler.py:214"),
    *_row("vllm.v1.core.sched.output:SchedulerOutput.scheduled_new_reqs", "read", "requests of a step",
          NO_TRACE, "v1/core/sched/output.py:236"),
    *_row("vllm.v1.core.sched.output:NewRequestData.req_id", "read", "requests of a step", NO_TRACE,
          "v1/core/sched/output.py:42"),
    *_row("vllm.v1.request:Request.{num_computed_tokens,num_tokens,num_output_tokens}", "read",
          "which of its blocks a request filled", NO_TRACE, "v1/request.py:184"),
    *_row("vllm.config.parallel:ParallelConfig.data_parallel_rank", "read", "a file for each engine",
          NO_TRACE, "config/parallel.py:153"),
)

_CPU = (
    *_row("vllm.platforms:current_platform", "read", "is this the CPU?", "CPU speculation is not mended",
          "platforms/__init__.py:303"),
    *_row("vllm.platforms.interface:Platform.{is_cpu,import_kernels}", "call",
          "is this the CPU; loads its operators for the probe", "CPU speculation is not mended",
          "platforms/interface.py:366"),
    *_row("vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides", "read",
          "takes `_expand_kernel_impl` from its module when the worker starts",
          "CPU speculation is not mended", "platforms/cpu.py:670", calls=("register_kernels",)),
    *_row("vllm.triton_utils:HAS_TRITON", "read", "with Triton the CPU runs the real kernel",
          "CPU speculation is not mended", "triton_utils/__init__.py:6"),
    *_row("vllm.utils.cpu_triton_utils:_expand_kernel_impl", "set attribute",
          "writes into a temporary: wrong sampling under speculation", "CPU speculation is not mended",
          "issue 55005, pull request 55006"),
    *_row("vllm.triton_utils.dispatcher:{register_kernels,_registry}", "call",
          "renews a registration that was made before us", "CPU speculation is not mended",
          "triton_utils/dispatcher.py:147"),
)
# fmt: on

SEAMS: tuple[Seam, ...] = (
    *_ACTIVATION,
    *_CONFIG,
    *_FRONT_END,
    *_ENGINE,
    *_RETENTION,
    *_OFFLOAD,
    *_TRACE,
    *_CPU,
)
