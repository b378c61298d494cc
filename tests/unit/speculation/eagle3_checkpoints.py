"""Small EAGLE3 checkpoints for the tests: a random head and its folder in the speculators layout."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.decoder_shape import DecoderShape
from cluster.speculation.eagle3_config import Eagle3Config
from cluster.speculation.eagle3_model import Eagle3Head

LAYER = DecoderShape(
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)
CONFIG = Eagle3Config(layer=LAYER, vocab_size=60, draft_vocab_size=20, target_hidden_size=32, aux_layer_ids=(1, 2, 3))
DOCUMENT: dict[str, object] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 20,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": 60,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}


@cache
def borrowed() -> BorrowedWeights:
    """A target's embedding and output matrix, 60 tokens of width 32."""
    generator = torch.Generator().manual_seed(1)
    return BorrowedWeights(torch.randn(60, 32, generator=generator), torch.randn(60, 32, generator=generator))


def random_head(config: Eagle3Config = CONFIG) -> Eagle3Head:
    """A head whose draft id i is target id 3 i where the vocabularies differ."""
    torch.manual_seed(0)
    head = Eagle3Head(config, borrowed().embedding)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    if config.draft_vocab_size < config.vocab_size:
        head.d2t.copy_(2 * torch.arange(config.draft_vocab_size))
    return head.eval().requires_grad_(False)


def write(head: Eagle3Head, folder: Path, document: dict[str, object] = DOCUMENT) -> dict[str, Tensor]:
    """The folder of `head`, described by `document`; the tensors that are in it."""
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    (folder / "config.json").write_text(json.dumps(document))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def load(folder: Path, target_layers: int | None = None, allow_pickle: bool = False) -> Eagle3Head:
    return Eagle3Head.load(folder, borrowed(), torch.float32, target_layers, allow_pickle)
