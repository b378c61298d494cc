"""What a GGUF file says about a model, as the JSON documents and the tokenizer of a Hugging Face folder.

Owns: the meaning of GGUF metadata fields for a llama with a byte-level BPE tokenizer. Invariant: a field that is
needed and missing, or a tokenizer that would be read wrongly, is refused with one sentence. Called by
`cluster.models.gguf`.
"""

from __future__ import annotations

from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.errors import ModelLoadError

_PRE_TOKENIZER = "smollm"  # GPT-2's byte-level BPE with every digit on its own


class Fields:
    """The metadata of a GGUF file, by key."""

    def __init__(self, reader: GGUFReader) -> None:
        self._reader = reader

    def get(self, key: str, default: Any = None) -> Any:
        """The field's value, or `default` if the file lacks it."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """The field's value. Raises `ModelLoadError` if the file lacks it."""
        value = self.get(key)
        if value is None:
            raise ModelLoadError(f"GGUF metadata field {key} is missing; use a file made by llama.cpp's converter.")
        return value


def model_config(fields: Fields, tied: bool) -> dict[str, Any]:
    """`config.json`; `tied` says that the output embedding is the input's."""
    hidden, heads = int(fields.need("llama.embedding_length")), int(fields.need("llama.attention.head_count"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields.need("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": int(fields.need("llama.feed_forward_length")),
        "num_hidden_layers": int(fields.need("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(fields.get("llama.rope.dimension_count", hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": int(fields.need("llama.context_length")),
        # The file holds a float32; rounding gives back the decimal that the model's authors wrote.
        "rms_norm_eps": float(f"{fields.need('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **_special_ids(fields),
        "dtype": "bfloat16",
    }


def _special_ids(fields: Fields) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {ours: fields.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    return {name: int(value) for name, value in found.items() if value is not None}


def generation_config(fields: Fields) -> dict[str, Any]:
    """`generation_config.json`: greedy, with the file's special tokens."""
    return {"do_sample": False, **_special_ids(fields)}


def tokenizer_config(fields: Fields) -> dict[str, Any]:
    """`tokenizer_config.json`, with the chat template if the file has one."""
    tokens = fields.need("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": bool(fields.get("tokenizer.ggml.add_space_prefix", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields.need("llama.context_length")),
    }
    for name, token_id in _special_ids(fields).items():
        config[name.removesuffix("_id")] = tokens[token_id]
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def tokenizer(fields: Fields) -> Tokenizer:
    """The tokenizer, from the file's vocabulary and merges. Raises `ModelLoadError` for another kind."""
    kind, pre = fields.need("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if (kind, pre) != ("gpt2", _PRE_TOKENIZER):
        raise ModelLoadError(
            f"GGUF tokenizer {kind}/{pre} is not supported, only gpt2/{_PRE_TOKENIZER} is;"
            " use a safetensors folder of this model instead."
        )
    tokens: list[str] = fields.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in fields.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields.need("tokenizer.ggml.token_type")
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in special
        ]
    )
    return tokenizer
