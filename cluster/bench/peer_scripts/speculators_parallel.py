"""What speculators' DFlash and P-EAGLE drafts compute. Runs in speculators' environment.

    python speculators_parallel.py FOLDER...

Each folder holds a checkpoint in the "speculators" layout and `input.safetensors`: `tokens` [n], `states` [n - 1, aux
states] (the newest token's aren't known), and the target's `embedding` and `output` [vocabulary, H], for checkpoints
without their own. Written to it is `output.safetensors` with `logits` [rows, draft vocabulary]: of the block whose
anchor is the last token, or of the last pair and three masks behind it.
"""

# Types aren't checked: this runs where the peer is installed, and Tandem isn't.
# mypy: ignore-errors

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash import core as dflash
from speculators.models.peagle import core as peagle
from speculators.models.peagle.config import PEagleSpeculatorConfig
from torch.nn.functional import pad

MASKS = 3
BEYOND = 32  # both index their input at the places to be drafted, which lie beyond it


def load(kind, config_kind, folder, given):
    config = config_kind.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # the default needs a GPU
    model = kind(config).float().eval()  # its `from_pretrained` asks for the target's folder too
    borrowed = {"embed_tokens.weight": given["embedding"], "lm_head.weight": given["output"]}
    tensors = borrowed | load_file(folder / "model.safetensors")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or not all(name.startswith("verifier_") for name in missing):
        sys.exit(f"{folder}: missing {missing}, unexpected {unexpected}")
    return model


def inputs(tokens, states):
    tokens = pad(tokens, (0, BEYOND)).unsqueeze(0)
    states = pad(states, (0, 0, 0, tokens.shape[1] - len(states))).unsqueeze(0)
    return {
        "hidden_states": states,
        "input_ids": tokens,
        "loss_mask": torch.ones_like(tokens),
        "document_ids": torch.zeros_like(tokens),
        "verifier_last_hidden_states": states[..., : states.shape[-1] // 3],
    }


def block(folder, given):
    model = load(DFlashDraftModel, DFlashSpeculatorConfig, folder, given)
    anchor = torch.tensor([len(given["tokens"]) - 1])
    dflash.select_anchors = lambda *_: (anchor, torch.tensor([True]))
    return model._backbone_forward(**inputs(given["tokens"], given["states"]), max_anchors=1)[1]


def masked_pairs(folder, given):
    model = load(peagle.PEagleDraftModel, PEagleSpeculatorConfig, folder, given)
    pairs = len(given["states"])
    anchors = torch.cat([torch.arange(pairs), torch.full((MASKS,), pairs - 1)])
    depths = torch.cat([torch.zeros(pairs, dtype=torch.long), torch.arange(1, MASKS + 1)])
    peagle.generate_cod_sample_indices = lambda **_: (anchors, depths)
    peagle.compute_metrics = lambda **_: (None, {})
    logits = []
    model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output))
    model(**inputs(given["tokens"][1:], given["states"]))
    return logits[0][:, pairs - 1 :]


@torch.inference_mode()
def run(folder):
    given = load_file(folder / "input.safetensors")
    kind = json.loads((folder / "config.json").read_text())["speculators_model_type"]
    logits = {"dflash": block, "peagle": masked_pairs}[kind](folder, given)
    save_file({"logits": logits[0].float().contiguous()}, folder / "output.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        run(Path(name))
