"""What speculators' Eagle3DraftModel computes. Runs in speculators' environment.

    python speculators_eagle3.py STEPS FOLDER...

Each folder holds a checkpoint in the "speculators" layout and `input.safetensors`: `tokens` [n + 1], `states` [n, aux
states] and, for a checkpoint without one, `embedding`. Written to it is `output.safetensors`: for each of STEPS draft
steps k, `logits.k` [n, draft vocabulary]; row i is fed token i + 1 + k, and what row i of the step before put out.
"""

# Types aren't checked: this runs where the peer is installed, and Tandem isn't.
# mypy: ignore-errors

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig


def load(folder, embedding):
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # the default needs a GPU
    model = Eagle3DraftModel(config).float().eval()  # its `from_pretrained` asks for the target's folder too
    tensors = load_file(folder / "model.safetensors")
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or not all(name.startswith("verifier_") for name in missing):
        sys.exit(f"{folder}: missing {missing}, unexpected {unexpected}")
    return model


@torch.inference_mode()
def run(folder, steps):
    given = load_file(folder / "input.safetensors")
    model = load(folder, given.get("embedding"))
    logits = []
    model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0].float()))
    tokens, states = given["tokens"][1:].unsqueeze(0), given["states"].unsqueeze(0)
    model(hidden_states=states, input_ids=tokens, document_ids=torch.zeros_like(tokens), ttt_steps=steps)
    save_file({f"logits.{k}": step.contiguous() for k, step in enumerate(logits)}, folder / "output.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        run(Path(name), int(sys.argv[1]))
