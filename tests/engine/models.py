"""A tiny random Llama, so that an engine test starts in seconds and needs no download.

The weights come from a seed and are scaled so that the next-token distribution is neither flat nor
one-hot: greedy output is stable across runners and kernels, and sampling has something to get wrong.
The text it writes means nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

BOS, EOS, IM_START, IM_END, PAD = "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# The tokenizer's merges are learnt from this text: enough for common words to be one token.
CORPUS = (
    "You are a helpful assistant. Answer the question of the user in a short sentence.",
    "The system prompt is shared by every tenant, the rest of the prompt is private.",
    "Once upon a time there was a little server that kept the blocks of its cache in order.",
    "Translate the following sentence into French, then count its words and letters.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 16 20 32 64 100 128 256 512 1000 1024 2024",
    '{"name": "search", "arguments": {"query": "weather in Paris", "limit": 10}}',
    "def add(a: int, b: int) -> int:\n    return a + b\n",
)


@dataclass(frozen=True)
class TinyLlama:
    """Shape of the model; the defaults make a checkpoint of about 8 MB."""

    vocab_size: int = 512
    hidden_size: int = 256
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    max_position_embeddings: int = 4096
    seed: int = 0
    logit_scale: float = 2.5  # standard deviation of the logits at initialisation

    def save(self, path: Path) -> Path:
        """Write config, weights (float32), tokenizer and chat template to the folder `path`; returns it."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = _tokenizer(self.vocab_size)
        config = LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.max_position_embeddings,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
        )
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = LlamaForCausalLM(config).to(torch.float32)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if weight.dim() < 2:
                        continue
                    # The final norm makes the hidden state's entries about 1, so a row of the head with
                    # standard deviation s / sqrt(hidden) gives logits of standard deviation s.
                    fan_in = weight.shape[1]
                    scale = self.logit_scale if name == "lm_head.weight" else 1.0
                    std = 1.0 if "embed_tokens" in name else scale / fan_in**0.5
                    weight.normal_(0.0, std)
        path.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        (path / "generation_config.json").write_text(
            json.dumps({"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id})
        )
        return path


def _tokenizer(vocab_size: int):  # type: ignore[no-untyped-def]
    """Byte-level BPE of exactly `vocab_size` tokens: any text is encodable, ids are stable."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    bpe.add_tokens([f"<unused_{i}>" for i in range(bpe.get_vocab_size(), vocab_size)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random 4-layer Llama with a vocabulary of 512 and a chat template."""
    return str(TinyLlama().save(tmp_path_factory.mktemp("models") / "tiny-llama"))
