"""Writes a Llama model with random weights that vLLM really loads.

`mkmodel.py FOLDER LAYERS HIDDEN SHARDS`, with the Python of the vLLM environment.  With four heads HIDDEN
must be 256 or more: the CPU attention of vLLM has no kernel for a head dimension of 16.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512
HEADS = 4
CONTEXT = 2048


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0])
    layers, hidden, shards = map(int, arguments[1:4])
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", configuration(layers, hidden))
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    write_tokenizer(folder)
    write_shards(folder, shapes(layers, hidden), shards)


def configuration(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": hidden // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def shapes(layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, in the order in which it is stored."""
    square, wide, narrow = (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)
    block = {
        "self_attn.q_proj": square,
        "self_attn.k_proj": square,
        "self_attn.v_proj": square,
        "self_attn.o_proj": square,
        "mlp.gate_proj": wide,
        "mlp.up_proj": wide,
        "mlp.down_proj": narrow,
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(layers):
        result |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return result | {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}


def write_shards(folder: Path, tensors: dict[str, tuple[int, ...]], shards: int) -> None:
    import torch  # type: ignore[import-not-found]  # only the vLLM environment has these
    from safetensors.torch import save_file  # type: ignore[import-not-found]

    torch.manual_seed(0)
    total = sum(2 * math.prod(shape) for shape in tensors.values())
    places: dict[str, str] = {}
    parts: list[dict[str, Any]] = [{} for _ in range(shards)]
    done = 0
    for name, shape in tensors.items():
        number = min(shards - 1, done * shards // total)
        places[name] = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        weights = torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.02
        parts[number][name] = weights.to(torch.bfloat16)
        done += 2 * math.prod(shape)
    for number, part in enumerate(parts):
        save_file(part, folder / f"model-{number + 1:05d}-of-{shards:05d}.safetensors", {"format": "pt"})
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def write_tokenizer(folder: Path) -> None:
    from tokenizers import (  # type: ignore[import-not-found]
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 10,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["a rank waits at the barrier for the rank that still reads"] * 50, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings |= {"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
